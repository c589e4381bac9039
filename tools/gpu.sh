#!/bin/sh
# tools/gpu.sh PYTHON OUT: what only a GPU can show, on a machine that has PyTorch for it and no package registry.
#
# Builds the CPU operator in place with CMake, then runs the suites cuda, bench and host with that Python. Nothing is
# installed. OUT gets at most six files, none in a subfolder: build.log, run.log, gpu.json, gpu-bench-cuda-nvrtc.json,
# gpu-bench-cuda-ptx.json. The whole takes less than eight minutes.
set -u

if [ $# -ne 2 ] || [ -z "$1" ] || [ -z "$2" ]; then
    echo "usage: tools/gpu.sh PYTHON OUT; with make: make gpu PYTHON=python3 OUT=folder" >&2
    exit 2
fi
python=$(command -v "$1") || { echo "tools/gpu.sh needs Python, and '$1' is not found" >&2; exit 2; }
mkdir -p "$2" || exit 2
out=$(cd "$2" && pwd)
cd "$(dirname "$0")/.." || exit 2

# CMake and Ninja may stand beside Python, in an environment that is not active.
PATH=$(dirname "$python"):$PATH
PYTHONPATH=$PWD/src${PYTHONPATH:+:$PYTHONPATH}
export PATH PYTHONPATH

build() {
    cmake -S . -B build/inplace -G Ninja -DRUDA_INPLACE=ON -DPython_EXECUTABLE="$python" && cmake --build build/inplace
}
echo "Building the CPU operator"
if ! build >"$out/build.log" 2>&1; then
    tail -n 20 "$out/build.log" >&2
    echo "The CPU operator was not built; the whole log: $out/build.log" >&2
    exit 1
fi

# The most telling first, should the time run out: 8 minutes less the build.
"$python" tools/run_adamw_regressions.py --suite cuda --suite bench --suite host --compiler both --device cuda \
    --iterations 10 --samples 5 --offline --timeout 240 --budget 430 --report "$out/gpu.json" >"$out/run.log" 2>&1
code=$?
cat "$out/run.log"
exit $code
