#!/bin/sh
# Usage: check_prerequisites.sh PYTHON. Says in one sentence what is missing before anything is downloaded.
set -eu
python=$1

fail() {
    echo "error: $*" >&2
    exit 1
}

command -v "$python" >/dev/null 2>&1 ||
    fail "'$python' was not found: install Python 3.10 or newer, or name yours with 'make PYTHON=/path/to/python3'."
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
    fail "'$python' is $("$python" --version 2>&1), but 3.10 or newer is needed: name a newer one with 'make PYTHON=...'."
"$python" -c 'import venv, ensurepip' 2>/dev/null ||
    fail "'$python' cannot create virtual environments: install its venv module (Debian, Ubuntu: python3-venv)."

if [ -n "${CXX:-}" ]; then
    command -v "${CXX%% *}" >/dev/null 2>&1 || fail "CXX is '$CXX', which was not found: correct it or unset it."
    compiler=$CXX
else
    compiler=
    for candidate in c++ g++ clang++; do
        if command -v "$candidate" >/dev/null 2>&1; then
            compiler=$candidate
            break
        fi
    done
    [ -n "$compiler" ] || fail "no C++ compiler was found: install one (Debian, Ubuntu: g++; Fedora: gcc-c++;" \
        "macOS: xcode-select --install), or set CXX to yours."
fi
# $compiler is unquoted on purpose: CXX may carry options.
printf '#include <cmath>\n#include <vector>\nint main() { return 0; }\n' |
    $compiler -std=c++17 -x c++ -fsyntax-only - 2>/dev/null ||
    fail "'$compiler' cannot compile a C++17 program with <cmath> and <vector>: install a C++17 compiler with the" \
        "standard library's headers (Debian, Ubuntu: g++; Fedora: gcc-c++; macOS: xcode-select --install)."
