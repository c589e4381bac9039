#!/bin/sh
# Usage: sanitize.sh PYTHON SANITIZERS PYTEST_ARGUMENT...
# Builds the operator library with the sanitizers (address,undefined or thread) and runs the tests against it.
set -eu
python=$1
sanitizers=$2
shift 2
root=$(cd "$(dirname "$0")/.." && pwd)
cd "$root"
build=build/sanitize-$(echo "$sanitizers" | tr ',' '-')
mkdir -p build
cxx=${CXX:-c++}

"$python" -m cmake -S . -B "$build" -G Ninja -DCMAKE_MAKE_PROGRAM="$("$python" -c 'import ninja; print(ninja.BIN_DIR)')/ninja" \
    -DPython_EXECUTABLE="$(cd "$(dirname "$python")" && pwd)/$(basename "$python")" \
    -DRUDA_SANITIZE="$sanitizers" >"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
"$python" -m cmake --build "$build" >>"$build.log" 2>&1 || { cat "$build.log"; exit 1; }
rm -rf "$build/packages"
mkdir -p "$build/packages"
cp -R src/ruda_optim src/ruda_torch "$build/packages/"
cp "$build/_ops.so" "$build/packages/ruda_optim/fused_adamw/kernels/"

# The sanitizer's runtime must come first in the process; libstdc++ beside it, so that exceptions are intercepted too.
case $sanitizers in
thread) runtimes="libtsan.so libstdc++.so" ;;
*) runtimes="libasan.so libubsan.so libstdc++.so" ;;
esac
preload=
for name in $runtimes; do
    preload="$preload $("$cxx" -print-file-name="$name")"
done

# -S leaves out the editable install's import hook, which would find the ordinary library first.
site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
export PYTHONPATH="$root/$build/packages:$site"
export PYTHONMALLOC=malloc
export ASAN_OPTIONS="detect_leaks=0:abort_on_error=1${ASAN_OPTIONS:+:$ASAN_OPTIONS}" # Python never frees all
export UBSAN_OPTIONS="print_stacktrace=1:halt_on_error=1${UBSAN_OPTIONS:+:$UBSAN_OPTIONS}"
# ThreadSanitizer sees the fork and join of our regions alone: a memcpy inside torch's own operators would look like a race.
export TSAN_OPTIONS="suppressions=$root/tools/tsan.supp:ignore_noninstrumented_modules=1:halt_on_error=1${TSAN_OPTIONS:+:$TSAN_OPTIONS}"
# --capture=sys: a report goes to the file descriptor, and pytest must not swallow it when the process dies.
LD_PRELOAD="$preload" exec "$python" -S -m pytest -p no:cacheprovider --capture=sys \
    -m "not slow and not distributed and not integration" "$@"
