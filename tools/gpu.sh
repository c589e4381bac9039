#!/bin/sh
# tools/gpu.sh PYTHON OUT: what only a GPU can show, on a machine that has PyTorch for it and a C++ compiler.
#
# Says in one sentence what is missing, installs nothing, builds the CPU operator in place with CMake, then runs the suites
# cuda, bench and host. Called again with the same OUT it takes up what did not pass. OUT gets build.log, run.log, and for
# each call a report (gpu.json, gpu-2.json, ...) with the numbers of its benchmarks beside it; attach the whole folder to
# an issue. The whole takes less than eight minutes.
#
# RUDA_GPU_SUITES: what to run instead. The rehearsal in tests/tools/test_gpu_script.py, without a GPU, sets it.
set -u

if [ $# -ne 2 ] || [ -z "$1" ] || [ -z "$2" ]; then
    echo "usage: tools/gpu.sh PYTHON OUT; with make: make gpu PYTHON=python3 OUT=folder" >&2
    exit 2
fi
say() {
    echo "tools/gpu.sh: $*" >&2
    exit 2
}
python=$(command -v "$1") || say "'$1' is not found; name a Python that has torch: make gpu PYTHON=python3"
mkdir -p "$2" || exit 2
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 2

# CMake and Ninja may stand beside Python, in an environment that is not active.
PATH=$(dirname "$python"):$PATH
PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export PATH PYTHONPATH

suites=${RUDA_GPU_SUITES:---suite cuda --suite bench --suite host --compiler both --device cuda --iterations 10 --samples 5}
missing=$("$python" - "$suites" <<'EOF'
import importlib.util, sys
name = sys.executable
if sys.version_info < (3, 10):
    sys.exit(print(f"{name} is Python {sys.version.split()[0]}, and 3.10 or later is needed"))
modules = ("torch", "numpy", "pytest", "hypothesis")
absent = [module for module in modules if importlib.util.find_spec(module) is None]
if absent:
    sys.exit(print(f"{name} lacks {', '.join(absent)}: {name} -m pip install {' '.join(absent)}"))
import torch
if "--device cuda" in sys.argv[1] and not torch.cuda.is_available():
    built = torch.version.cuda or torch.version.hip
    sys.exit(print(f"torch {torch.__version__} sees no GPU (it is built {f'for {built}' if built else 'without CUDA'})"))
EOF
) || say "'$python' does not start"
[ -z "$missing" ] || say "$missing"
command -v cmake >/dev/null || say "CMake is not found, with which the CPU operator is built: $python -m pip install cmake"
command -v "${CXX:-c++}" >/dev/null || say "there is no C++ compiler ('${CXX:-c++}'): install g++ or clang++, or set CXX"
generator=
command -v ninja >/dev/null && generator="-G Ninja"

build() {
    # shellcheck disable=SC2086  # no generator is no argument
    cmake -S . -B build/inplace $generator -DRUDA_INPLACE=ON -DPython_EXECUTABLE="$python" &&
        cmake --build build/inplace --parallel
}
echo "Building the CPU operator"
if ! build >"$out/build.log" 2>&1; then
    tail -n 20 "$out/build.log" >&2
    say "the CPU operator was not built; the whole log: $out/build.log"
fi

# The most telling first, should the time run out: 8 minutes less the build.
# shellcheck disable=SC2086  # several words
"$python" tools/run_adamw_regressions.py $suites --resume --offline --timeout 240 --budget 430 \
    --report "$out/gpu.json" >"$out/run.log" 2>&1
code=$?
cat "$out/run.log"
exit $code
