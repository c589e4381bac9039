"""Lets a torch that is built for CUDA be imported without NVIDIA's libraries, for tests on a CPU.

    python tools/stand_ins.py FOLDER    # torch/lib of an environment that has nothing else to do

PyPI's torch for Linux links several GB of CUDA libraries, which a test on a CPU never calls. Each that is missing gets
a stand-in in FOLDER with the functions that torch links, which all answer "no CUDA device". Needs gcc and binutils.
A torch that was treated so says what ours does on a CPU with this version, and nothing about CUDA.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

NO_DEVICE = 100  # cudaErrorNoDevice
ALWAYS = ("libcudart.so", "libcupti.so")  # bundled by some versions; a real one would ask the driver's stand-in
NVIDIA = re.compile(r"(?:cu|nccl|nvshmem|nvrtc|nvJitLink|nvtx)\w+")


def printed(*command: str, **variables: str) -> str:
    return subprocess.run(
        command, env=os.environ | variables, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    ).stdout


def missing(folder: Path, libraries: list[Path]) -> set[str]:
    """Libraries that the loader does not find for torch's own."""
    found: set[str] = set()
    for library in libraries:
        text = printed("ldd", str(library), LD_LIBRARY_PATH=str(folder))
        found.update(re.findall(r"(\S+) => not found", text))
        found.update(name for name in re.findall(r"^\s*(\S+) =>", text, re.MULTILINE) if name.startswith(ALWAYS))
    return found


def functions(libraries: list[Path]) -> tuple[set[str], dict[str, dict[str, set[str]]]]:
    """What torch links: names without a version, and names by library and version."""
    plain: set[str] = set()
    versioned: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for library in libraries:
        owner: dict[str, str] = {}
        for block in re.split(r"required from ", printed("objdump", "-p", str(library)))[1:]:
            name, _, rest = block.partition(":")
            owner |= dict.fromkeys(re.findall(r"0x\w+ 0x\w+ \d+ (\S+)", rest), name)
        for symbol in re.findall(r"^\s+U (\S+)$", printed("nm", "-D", "--undefined-only", str(library)), re.MULTILINE):
            name, _, version = symbol.partition("@")
            if version.lstrip("@") in owner:
                versioned[owner[version.lstrip("@")]][version.lstrip("@")].add(name)
            elif not version and NVIDIA.fullmatch(name):
                plain.add(name)
    return plain, versioned


def build(library: Path, names: set[str], versions: dict[str, set[str]]) -> None:
    every = sorted(names.union(*versions.values()))
    with tempfile.TemporaryDirectory() as temporary:
        source, script = Path(temporary) / "functions.c", Path(temporary) / "versions.map"
        source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in every))
        script.write_text(
            "".join(f"{key} {{ {' '.join(f'{n};' for n in sorted(of))} }};\n" for key, of in versions.items())
        )
        command = ["gcc", "-w", "-fno-builtin", "-shared", "-fPIC", f"-Wl,-soname,{library.name}", str(source)]
        command += [f"-Wl,--version-script={script}"] * bool(versions)
        library.unlink(missing_ok=True)
        subprocess.run([*command, "-o", str(library)], check=True)


def main() -> int:
    folder = Path(sys.argv[1])
    libraries = [
        path for path in sorted(folder.glob("*.so*")) if path.name.startswith(("libtorch", "libc10", "libcaffe"))
    ]
    plain, versioned = functions(libraries)
    # A name without a version may come from any library: the first stand-in has them all.
    for name in sorted(missing(folder, libraries)):
        build(folder / name, plain, versioned.get(name, {}))
        plain = set()
        print("a stand-in for", name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
