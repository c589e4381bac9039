#!/bin/sh
# tools/gpu_matrix.sh [PYTHON]: compiles every device kernel ahead of time with each compiler that a supported torch brings,
# for each architecture, and checks the code (tools/fused_adamw/aot_*.py). Needs no GPU and says nothing about one.
#
# PYTHON is that of a development environment (default: .venv/bin/python). Each compiler gets an environment of its own in
# build/gpu-matrix that sees the packages of PYTHON behind its own. Takes half an hour of one core; downloads 500 MB. What
# is there already is not compiled again: remove build/gpu-matrix/*.json after a change. The result of all is
# benchmarks/results/gpu-compiled.json, which docs/generate.py shows.
#
# RUDA_MATRIX_NVRTC, RUDA_MATRIX_TRITON: other versions, for example "12.8", or none of a compiler with " ".
# RUDA_MATRIX_NVRTC_TARGETS, RUDA_MATRIX_TRITON_TARGETS: other architectures.
set -u
cd "$(dirname "$0")/.." || exit 2
python=${1:-.venv/bin/python}
work=build/gpu-matrix
mkdir -p "$work"

# Which torch brings what: docs/gpu-compilers.md.
TRITONS=${RUDA_MATRIX_TRITON:-3.6.0 3.9.0}
NVRTCS=${RUDA_MATRIX_NVRTC:-12.8 13.5}
NVRTC_TARGETS=${RUDA_MATRIX_NVRTC_TARGETS:-sm_75 sm_80 sm_86 sm_89 sm_90 sm_100 sm_120}
TRITON_TARGETS=${RUDA_MATRIX_TRITON_TARGETS:-sm_80 sm_90 sm_100 gfx942}

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
    log=$work/$1.log facts=$work/$1.json
    shift
    if [ -s "$facts" ]; then
        state="ok, before"
        grep -q '"problems": \[$' "$facts" && { state="FAILED before"; code=1; }
    else
        PYTHONPATH=src:tools "$@" --json "$facts" >"$log" 2>&1 && state=ok || { state=FAILED; code=1; }
    fi
    echo "$state $(basename "$log" .log): $(tail -n 1 "$log")"
}

for version in $NVRTCS; do
    major=${version%%.*}
    case $major in
    12) environment "nvrtc-$version" "nvidia-cuda-nvrtc-cu12==$version.*" "cuda-bindings==12.*" cuda-pathfinder ;;
    *) environment "nvrtc-$version" "nvidia-cuda-nvrtc==$version.*" "cuda-bindings==$major.*" cuda-pathfinder ;;
    esac
    for target in $NVRTC_TARGETS; do
        check "nvrtc-$version-$target" "$work/nvrtc-$version/bin/python" tools/fused_adamw/aot_nvrtc.py --arch "$target"
    done
done
for version in $TRITONS; do
    environment "triton-$version" "triton==$version"
    for target in $TRITON_TARGETS; do
        check "triton-$version-$target" "$work/triton-$version/bin/python" tools/fused_adamw/aot_triton.py --target "$target"
    done
done
"$python" tools/fused_adamw/compile_report.py "$work" || code=1
exit $code
