#!/bin/sh
# tools/gpu_matrix.sh [PYTHON]: compiles every device kernel ahead of time with each compiler that a supported torch brings,
# for each architecture, and checks the code (tools/fused_adamw/aot_*.py). Needs no GPU and says nothing about one.
#
# PYTHON is that of a development environment (default: .venv/bin/python). Each compiler gets an environment of its own in
# build/gpu-matrix that sees the packages of PYTHON behind its own. Takes about an hour of one core; downloads 500 MB.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${1:-.venv/bin/python}
work=build/gpu-matrix
mkdir -p "$work"

# Which torch brings what: docs/gpu-compilers.md.
TRITONS="3.6.0 3.9.0"
NVRTCS="12.8 13.5"
NVIDIA="sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120"
AMD="gfx90a gfx942 gfx1100"

environment() { # NAME PACKAGE...
    folder=$work/$1
    shift
    [ -f "$folder/ready" ] && return
    "$python" -m venv --clear "$folder" || exit 2
    "$folder/bin/python" -m pip install --quiet --no-deps "$@" || exit 2
    # Only now: pip would take what PYTHON has for installed.
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$packages/development.pth" &&
        touch "$folder/ready"
}

code=0
check() { # NAME COMMAND...
    log=$work/$1.log
    shift
    PYTHONPATH=src:tools "$@" >"$log" 2>&1 && state=ok || { state=FAILED; code=1; }
    echo "$state $(basename "$log" .log): $(tail -n 1 "$log")"
}

for version in $NVRTCS; do
    major=${version%%.*}
    case $major in
    12) environment "nvrtc-$version" "nvidia-cuda-nvrtc-cu12==$version.*" "cuda-bindings==12.*" cuda-pathfinder ;;
    *) environment "nvrtc-$version" "nvidia-cuda-nvrtc==$version.*" "cuda-bindings==$major.*" cuda-pathfinder ;;
    esac
    for target in $NVIDIA; do
        check "nvrtc-$version-$target" "$work/nvrtc-$version/bin/python" tools/fused_adamw/aot_nvrtc.py --arch "$target"
    done
done
for version in $TRITONS; do
    environment "triton-$version" "triton==$version"
    for target in $NVIDIA $AMD; do
        check "triton-$version-$target" "$work/triton-$version/bin/python" tools/fused_adamw/aot_triton.py --target "$target"
    done
done
exit $code
