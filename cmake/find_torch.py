"""Print where torch lies, for CMake: version, include directory, the CPU library; one line each.

torch is located, not imported: importing it takes seconds and, in a half-installed environment, ends in a traceback.
What is missing is said in one sentence on standard error, with exit status 1.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import pathlib
import re
import sys
import sysconfig

MINIMUM = (2, 10)
# Front ends that build in isolation, by what the paths of their environments contain, and how to build without it.
ISOLATION = {
    "pip-build-env-": "pip install --no-build-isolation .",
    "builds-v": "uv pip install --no-build-isolation .",
    "build-env-": "python -m build --no-isolation",
}


def absent() -> str:
    """Why torch cannot be found, and what to do."""
    tools = "scikit-build-core cmake ninja"
    for mark, command in ISOLATION.items():
        if any(mark in path for path in (sys.prefix, *sys.path)):
            # pip keeps the interpreter and hides its packages; the others use an interpreter of their own.
            outside = pathlib.Path(sysconfig.get_path("platlib"), "torch")
            seen = f"torch is installed ({outside}), but " if outside.is_dir() else ""
            missing = tools if seen else f"torch {tools}"
            return (
                f"{seen}this build is isolated and cannot see the torch that ruda-optim is to be built against: run "
                f"'pip install {missing}', then '{command}'."
            )
    return (
        f"torch is not installed for {sys.executable}: run 'pip install torch {tools}' there, then install ruda-optim "
        "with 'pip install --no-build-isolation', which builds against that torch."
    )


def main() -> None:
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        sys.exit(absent())
    version = importlib.metadata.version("torch")
    found = re.match(r"(\d+)\.(\d+)", version)
    if found is None or tuple(map(int, found.groups())) < MINIMUM:
        sys.exit(f"torch {version} is installed, but 2.10 or newer is needed: run 'pip install --upgrade torch'.")

    root = pathlib.Path(spec.origin).parent
    header = root / "include" / "torch" / "csrc" / "stable" / "library.h"
    if not header.is_file():
        sys.exit(f"torch {version} has no C++ headers ({header} is missing): install torch from its official wheel.")
    libraries = [root / "lib" / name for name in ("libtorch_cpu.so", "libtorch_cpu.dylib")]
    library = next((path for path in libraries if path.is_file()), None)
    if library is None:
        sys.exit(f"torch {version} has no libtorch_cpu in {root / 'lib'}: install torch from its official wheel.")
    print(version, root / "include", library, sep="\n")


if __name__ == "__main__":
    main()
