"""Rules of the repository that no linter knows: where the formula stands, who imports what, how long a file may be."""

from __future__ import annotations

import ast
import io
import pathlib
import re
import sys
import tokenize

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
SRC = ROOT / "src"
FUSED = "ruda_optim/fused_adamw"

# The four places of the AdamW formula: the C++ header that the CPU and NVRTC backends compile, the Triton kernel, the
# FP64 reference, and the generic optimizer made of plain tensor operations.
FORMULA = {
    f"{FUSED}/kernels/csrc/adamw_update.h",
    f"{FUSED}/kernels/triton/update.py",
    f"{FUSED}/reference.py",
    "ruda_optim/generic.py",
}
# Square roots that are no part of the formula, with what they are.
OTHER_ROOTS = {
    f"{FUSED}/gradient_norm.py": "the L2 norm from the report's sum of squares",
    f"{FUSED}/kernels/csrc/gradient_stats.h": "the same norm, where the device decides about clipping",
    f"{FUSED}/kernels/triton/decide.py": "the same norm in Triton",
    "ruda_torch/adamw.py": "the L2 norms per parameter group",
    "ruda_torch/reduction.py": "the L2 norm over all ranks",
    "ruda_torch/ranks.py": "the weight of copies on many ranks",
    "ruda_torch/report.py": "the L2 norm of each parameter's gradient",
}
SQUARE_ROOT = re.compile(r"\w*(?<![a-z])r?sqrt(?:f|_rn|_)?\s*\(|__fsqrt|\*\*\s*\(?\s*0\.5|\.sqrt\b")
# The step of a moment towards the gradient, coefficient * (g - m) or coefficient * (g * g - v); further,
# beta times something, or (1 - beta) times something, in the spellings of the four files and torch's fused forms.
MOMENT_UPDATE = re.compile(
    r"\*\s*\(\s*(?:gg?|grad|gradient|g\s*\*\s*g)\s*-(?!>)"
    r"|(?:one_minus_)?b(?:eta)?_?[12]s?\b\)?\s*\*(?!\*)|\*\s*\(?(?:1(?:\.0)?\s*-\s*)?(?:\w+\.)?(?:one_minus_)?beta_?[12]\b"
    r"|\blerp_?\(|addcmul|addcdiv"
)
# The optional package that each device backend compiles with.
BACKEND_OF = {"triton": "triton", "cuda": "nvrtc"}
# The framework that each file of integrations/ is for, and imports; import-linter sees that no other file needs it.
FRAMEWORK_OF = {f"ruda_torch/integrations/{name}.py": name for name in ("transformers", "lightning")}
MAX_LINES = 420  # 400 and a little grace


def sources(*suffixes: str) -> list[pathlib.Path]:
    return sorted(path for path in SRC.rglob("*") if path.suffix in suffixes)


def relative(path: pathlib.Path) -> str:
    return path.relative_to(SRC).as_posix()


def existing(names: set[str]) -> set[str]:
    return {name for name in names if (SRC / name).is_file()}


def code_of(path: pathlib.Path) -> str:
    """The file without comments and docstrings, so that documentation may quote the formula."""
    text = path.read_text(encoding="utf-8")
    if path.suffix != ".py":
        return re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.DOTALL)
    kept: list[str] = []
    line_starts = True
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.NEWLINE, tokenize.NL, tokenize.INDENT, tokenize.DEDENT):
            kept.append("\n")
            line_starts = True
        elif token.type == tokenize.COMMENT or (token.type == tokenize.STRING and line_starts):
            continue
        else:
            kept.append(token.string)
            line_starts = False
    # Tokens joined by spaces, then attribute dots and calls closed up again: "math . sqrt ( x" -> "math.sqrt( x".
    return re.sub(r" ?(\.) ?| (?=\()", r"\1", " ".join(kept))


def files_with(pattern: re.Pattern[str]) -> set[str]:
    return {relative(path) for path in sources(".py", ".h", ".cpp", ".cu") if pattern.search(code_of(path))}


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        (SQUARE_ROOT, "math.sqrt(v)"),
        (SQUARE_ROOT, "np.sqrt(v)"),
        (SQUARE_ROOT, "tl.sqrt_rn(v)"),
        (SQUARE_ROOT, "sqrt_rn(v_used * c.inv_bias2)"),
        (SQUARE_ROOT, "__builtin_sqrtf(x)"),
        (SQUARE_ROOT, "v.sqrt()"),
        (SQUARE_ROOT, "v.sqrt_()"),
        (SQUARE_ROOT, "rsqrtf(v)"),
        (SQUARE_ROOT, "v ** 0.5"),
        (MOMENT_UPDATE, "m += c.one_minus_beta1 * (g - m)"),
        (MOMENT_UPDATE, "m += tl.load(c + 2) * (g - m)"),
        (MOMENT_UPDATE, "v += w * (g * g - v)"),
        (MOMENT_UPDATE, "beta2 * v"),
        (MOMENT_UPDATE, "(1 - beta1) * g"),
        (MOMENT_UPDATE, "g * (1 - beta1)"),
        (MOMENT_UPDATE, "m.mul_(b1).add_(g * (1 - options.beta1))"),
        (MOMENT_UPDATE, "m.lerp_(g, 1 - beta1)"),
        (MOMENT_UPDATE, "e.m = lerp(e.m, g, c.one_minus_beta1)"),
        (MOMENT_UPDATE, "v.addcmul_(g, g, value=1 - beta2)"),
    ],
)
def test_census_patterns_see_the_formula(pattern: re.Pattern[str], text: str) -> None:
    assert pattern.search(text)


@pytest.mark.parametrize("text", ["1.0 - beta1**step", "beta1 ** step", "1 - beta2", "betas = (beta1, beta2)"])
def test_census_patterns_let_bias_corrections_pass(text: str) -> None:
    assert not MOMENT_UPDATE.search(text)
    assert not SQUARE_ROOT.search(text)


def test_moment_updates_stand_in_the_four_places_only() -> None:
    assert files_with(MOMENT_UPDATE) == existing(FORMULA)


def test_square_roots_stand_in_the_four_places_and_the_norms() -> None:
    found = files_with(SQUARE_ROOT)
    assert found - FORMULA <= OTHER_ROOTS.keys(), "a square root outside the formula and the norms"
    assert found >= existing(FORMULA), "the census did not find the formula where it must stand"


def imported_modules(path: pathlib.Path) -> list[str]:
    """Every module that the file imports, anywhere in it."""
    names: list[str] = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
    return names


@pytest.mark.parametrize("folder", ["tools/fused_adamw", "benchmarks"])
def test_no_two_files_import_each_other(folder: str) -> None:
    """Imports for type hints and inside of functions included."""
    files = {path.stem: path for path in (ROOT / folder).glob("*.py")}
    imports = {
        name: {word for module in imported_modules(path) for word in module.split(".")[:2] if word in files} - {name}
        for name, path in files.items()
    }
    assert sum(map(len, imports.values())) >= 5, "the census saw nothing"
    assert not {frozenset((a, b)) for a, names in imports.items() for b in names if a in imports[b]}


def test_src_imports_only_the_declared_dependencies() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "torch", "triton", "cuda", "ruda_optim", "ruda_torch"}
    foreign = {
        (relative(path), name)
        for path in sources(".py")
        for name in imported_modules(path)
        if name.partition(".")[0] not in allowed | {FRAMEWORK_OF.get(relative(path), "")}
    }
    assert not foreign, "neither tests, tools, benchmarks nor an undeclared package may be imported from src"


def test_two_files_know_torch_distributed() -> None:
    users = {
        relative(path)
        for path in sources(".py")
        for name in imported_modules(path)
        if name.startswith("torch.distributed") or "DTensor" in name
    }
    assert users <= {"ruda_torch/sharding.py", "ruda_torch/ranks.py"}


def test_optional_compilers_are_imported_by_their_backend_only() -> None:
    users = {
        (name.partition(".")[0], relative(path))
        for path in sources(".py")
        for name in imported_modules(path)
        if name.partition(".")[0] in {"triton", "cuda"}
    }
    outside = {
        (package, name)
        for package, name in users
        if not re.fullmatch(rf"{FUSED}/kernels/{BACKEND_OF[package]}/\w+\.py", name)
    }
    assert not outside


@pytest.mark.parametrize("path", sources(".py", ".h", ".cpp", ".cu"), ids=relative)
def test_files_stay_readable(path: pathlib.Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
