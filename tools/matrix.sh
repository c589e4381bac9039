#!/usr/bin/env bash
# tools/matrix.sh [PYTHON:TORCH...]: the core tests with other versions of Python and torch, one environment at a time.
#
#     tools/matrix.sh                                    # those below
#     tools/matrix.sh python3.11:2.14.1 python3.13:2.13.0
#
# Each environment is made in a temporary folder, gets torch with all it asks for (a CUDA build may be several GB), builds
# a copy of the tracked files and runs its tests; it is removed before the next is made. A pair whose Python or torch
# cannot be had is reported and passed over. Logs lie in build/matrix. Exit status 1 if anything failed or nothing ran. Not
# part of .ci/run.
#
# RUDA_MATRIX_REPORT=FILE: also add what ran to this file; benchmarks/results/versions.json (with its whole path) is the one
# that the page on what was run shows.
# RUDA_MATRIX_STAND_INS=1: torch without what it asks for, and tools/stand_ins.py in the place of NVIDIA's libraries.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

pairs=("$@")
if [ ${#pairs[@]} -eq 0 ]; then
    pairs=(python3.11:2.10.0 python3.11:2.13.0 python3.11:2.14.1 python3.10:2.13.0 python3.12:2.13.0 python3.13:2.13.0)
fi
core=(tests/functional tests/optimizer tests/kernels/test_cpu_*.py tests/kernels/test_launch_table.py
    tests/kernels/test_fixtures.py)
logs=$PWD/build/matrix
mkdir -p "$logs"
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
mkdir "$folder/tree"
git ls-files -z | tar --null --files-from - --create | tar --extract --directory "$folder/tree"
cd "$folder/tree"
rows=()
failed=0
ran=0

# Makes the environment and runs the tests; says on the last line of standard output what came of it.
run_pair() {
    local python=$1 torch=$2 log=$3 venv=$folder/venv status
    command -v "$python" >/dev/null || { echo "no $python here"; return 2; }
    "$python" -m venv "$venv" >"$log" 2>&1 || { echo "no virtual environment"; return 2; }
    local pip=("$venv/bin/python" -m pip install -q --disable-pip-version-check --no-cache-dir)
    local only=()
    [ -z "${RUDA_MATRIX_STAND_INS:-}" ] || only=(--no-deps)
    "${pip[@]}" "${only[@]}" "torch==$torch" >>"$log" 2>&1 || { echo "torch $torch cannot be installed"; return 2; }
    "${pip[@]}" numpy filelock typing-extensions sympy networkx jinja2 fsspec setuptools >>"$log" 2>&1 ||
        { echo "what torch needs cannot be installed"; return 2; }
    if [ -n "${RUDA_MATRIX_STAND_INS:-}" ]; then
        "$python" tools/stand_ins.py "$(echo "$venv"/lib/python3*/site-packages/torch/lib)" >>"$log" 2>&1 ||
            { echo "no stand-ins for CUDA's libraries"; return 2; }
    fi
    # tqdm and matplotlib: a test kills and resumes the demo.
    "${pip[@]}" pytest hypothesis expecttest safetensors tqdm matplotlib scikit-build-core cmake ninja >>"$log" 2>&1 ||
        { echo "the tests' tools cannot be installed"; return 2; }
    "${pip[@]}" --no-build-isolation --no-deps . >>"$log" 2>&1 ||
        { echo "ruda-optim was not built"; return 1; }
    "$venv/bin/python" -m pytest -q -p no:cacheprovider -W default -m "not slow and not integration" "${core[@]}" >>"$log" 2>&1
    status=$?
    tail -n 1 "$log"
    return $((status != 0))
}

for pair in "${pairs[@]}"; do
    log=$logs/${pair//:/-}.log
    echo "$pair ..." >&2
    outcome=$(run_pair "${pair%%:*}" "${pair#*:}" "$log")
    case $? in
        0) status=passed ran=1 ;;
        1) status=FAILED ran=1 failed=1 ;;
        *) status="not run" ;;
    esac
    if [ "$status" != "not run" ] && [ -n "${RUDA_MATRIX_REPORT:-}" ]; then
        version=$("${pair%%:*}" -c 'import platform; print(platform.python_version())')
        "${pair%%:*}" tools/matrix_report.py "$version" "${pair#*:}" "${RUDA_MATRIX_STAND_INS:-0}" "$status" \
            "${outcome//=/}" --output "$RUDA_MATRIX_REPORT"
    fi
    rows+=("$(printf '%-12s %-8s %-8s %s' "${pair%%:*}" "${pair#*:}" "$status" "${outcome//=/}")")
    rm -rf "$folder/venv" "$folder/tree/build"
done

printf '%-12s %-8s %-8s %s\n' python torch status tests
printf '%s\n' "${rows[@]}"
[ $failed -eq 0 ] && [ $ran -eq 1 ]
