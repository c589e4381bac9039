"""The documentation is true: its code runs, its links and file names exist, its numbers are those of the results.

A fenced ``python`` block runs, page by page, in order, in one namespace and one temporary folder. A block titled "needs
X" runs in the integration tests, which install the package X. One whose title begins with "not run:" gives its reason
there and is compiled only. A ``text`` block titled "prints" is what the block before it prints.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import io
import pathlib
import re
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from docs_pages import DOCS, ROOT, blocks, prose

from ruda_optim.memory_estimate import estimate

if TYPE_CHECKING:
    from collections.abc import Iterator

PAGES = [ROOT / "README.md", *sorted(DOCS.glob("*.md"))]
NAMES = [str(page.relative_to(ROOT)) for page in PAGES]
LANGUAGES = ("ja", "zh", "de", "ru")


@pytest.fixture
def empty_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[pathlib.Path]:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tiny tensors: waking a second thread on a busy machine costs more than all the work
    yield tmp_path
    torch.set_num_threads(threads)
    if "torch._dynamo" in sys.modules:
        torch.compiler.reset()


def run_page(name: str, *, installed: bool) -> int:
    """Run the page's code and return how many blocks that need a package ran.

    Args:
        name: of the page.
        installed: also run the blocks that need a package ("needs X") which is here.
    """
    text = (ROOT / name).read_text(encoding="utf-8")
    space: dict[str, object] = {"__name__": "page"}
    output: io.StringIO | None = None
    extra = 0
    for block in blocks(text):
        where = f"{name}:{block.line}"
        if block.language == "python":
            # The line numbers of a traceback are those of the page.
            code = compile("\n" * (block.line - 1) + block.body, where, "exec")
            output = None
            if block.title:
                package = re.fullmatch(r"needs (\w+)", block.title)
                assert package or re.match(r"not run: \w", block.title), f"{where} has the title {block.title!r}"
                if not (installed and package and importlib.util.find_spec(package[1])):
                    continue
                extra += 1
            output = io.StringIO()
            with contextlib.redirect_stdout(output):
                exec(code, space)
        elif block.title == "prints" and output is not None:
            assert block.body.strip() in output.getvalue(), f"{where} shows something else"
            if block.body.strip() != output.getvalue().strip():
                assert extra, f"{where} shows only a part"  # a framework prints more than the page shows
    return extra


@pytest.mark.parametrize("name", NAMES)
def test_code_of_the_page_runs(name: str, empty_folder: pathlib.Path) -> None:
    run_page(name, installed=False)


@pytest.mark.integration
@pytest.mark.filterwarnings("default")  # of the frameworks, about themselves
@pytest.mark.parametrize(("name", "count"), [("docs/frameworks.md", 6), ("docs/reinforcement-learning.md", 2)])
def test_code_that_needs_a_framework_runs(name: str, count: int, empty_folder: pathlib.Path) -> None:
    assert run_page(name, installed=True) == count


@pytest.mark.parametrize("name", NAMES)
def test_fences_are_closed_and_titled_as_agreed(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    assert "```" not in prose(text), "a fence is not closed, or closed with another indentation"
    for block in blocks(text):
        assert block.language in {"python", "text", "sh", "diff"}, f"{name}:{block.line}: {block.language!r}"


def anchors(page: pathlib.Path) -> set[str]:
    found = set()
    for heading in re.findall(r"^#+ +(.*?)\s*$", prose(page.read_text(encoding="utf-8")), re.MULTILINE):
        explicit = re.search(r"\{ *#([\w-]+) *\}", heading)
        plain = re.sub(r"[^\w\s-]", "", heading.lower()).strip()
        found.add(explicit[1] if explicit else re.sub(r"[\s-]+", "-", plain))
    return found


@pytest.mark.parametrize("name", NAMES)
def test_links_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = page if not path else (page.parent / path).resolve()
        assert file.exists(), f"{name} links to {target}, which does not exist"
        if anchor and file.suffix == ".md":
            assert anchor in anchors(file), f"{name} links to {target}; {file.name} has no such heading"


def test_site_links_stay_inside_the_site() -> None:
    """The site serves docs/ and the pictures of benchmarks/results; any other file is named, not linked."""
    for page in DOCS.glob("*.md"):
        for target in re.findall(r"\]\(([^)\s]+)\)", prose(page.read_text(encoding="utf-8"))):
            inside = not target.startswith("../") or target.startswith("../benchmarks/results/")
            assert inside, f"{page.name} links to {target}, outside docs/"


FILE_NAME = re.compile(
    r"`((?:src|tests|tools|benchmarks|examples|docs|kernels|csrc|\.ci)/[\w./*-]+|[\w-]+\.(?:py|toml|txt|yml))`"
)
LOOKED_IN = ("", "src", "src/ruda_torch", "src/ruda_optim/fused_adamw", "src/ruda_optim/fused_adamw/kernels", "tests",
             "tests/support",
             "benchmarks", "docs", "examples")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_files_named_in_the_text_exist(name: str) -> None:
    for file in FILE_NAME.findall(prose((ROOT / name).read_text(encoding="utf-8"))):
        assert any(list((ROOT / base).glob(file)) for base in LOOKED_IN), f"{name} names {file}, which does not exist"


def test_public_names_in_the_text_exist() -> None:
    """`ruda_torch.x` and `ruda_optim.x.y` in backticks are importable."""
    for page in PAGES:
        for dotted in re.findall(r"`(ruda_(?:torch|optim)(?:\.\w+)+)[`(]", prose(page.read_text(encoding="utf-8"))):
            parts = dotted.split(".")
            found = __import__(parts[0])
            for depth, part in enumerate(parts[1:], 2):
                if not hasattr(found, part):
                    __import__(".".join(parts[:depth]))
                found = getattr(found, part)


def sections(text: str) -> list[str]:
    return re.split(r"^#+ .*$", prose(text), flags=re.MULTILINE)


def numbers(text: str) -> Counter[str]:
    return Counter(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", re.sub(r"\]\([^)]*\)", "]", text)))


@pytest.mark.parametrize("language", LANGUAGES)
def test_translations_of_the_guide_agree(language: str) -> None:
    original = (DOCS / "guide.md").read_text(encoding="utf-8")
    translated = (DOCS / f"guide.{language}.md").read_text(encoding="utf-8")
    assert list_of_blocks(translated) == list_of_blocks(original)
    assert len(sections(translated)) == len(sections(original))
    for mine, theirs in zip(sections(translated), sections(original), strict=True):
        assert numbers(mine) == numbers(theirs), f"in the section that begins {mine.strip()[:60]!r}"
        assert Counter(re.findall(r"`[^`\n]+`", mine)) == Counter(re.findall(r"`[^`\n]+`", theirs))


def list_of_blocks(text: str) -> list[tuple[str, str]]:
    return [(block.language, block.body) for block in blocks(text)]


def script(path: pathlib.Path) -> Any:
    """A script as a module of its own name, whatever else is called like it."""
    name = f"docs_test_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def generator() -> Any:
    return script(DOCS / "generate.py")


def test_generated_pages_are_those_of_the_results() -> None:
    for name, text in generator().pages().items():
        committed = (DOCS / name).read_text(encoding="utf-8")
        assert committed == text, f"docs/{name} is out of date; run: python docs/generate.py"


def test_the_last_row_of_the_readme_is_the_one_that_loses() -> None:
    """The text below its table says so."""
    ratios = re.findall(r"\| \*\*([\d.]+)\*\* \|$", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(ratios) == 5
    assert [float(ratio) < 1.0 for ratio in ratios] == [False] * 4 + [True]


SPREAD = {"median": 1.5, "p20": 1.25, "p80": 2.0, "min": 1.0, "max": 3.0}
MEASURED = {"status": "measured", "ratio": SPREAD, "ours ms": SPREAD, "peer ms": SPREAD, "rounds kept": 15}
GPU = {"device": "NVIDIA X"}
REPORTS = {
    "a.json": {
        "environment": {"date": "2026-01-02T03:04:05", "cpu": "a CPU", "threads": 2, "versions": {"torch": "2.13.0"}},
        "workloads": {"w": {"title": "some tensors"}},
        "variants": {"v": {"title": "plain"}},
        "peers": {"p": "a peer", "q": "another"},
        "comparisons": [
            {"workload": "w", "variant": "v", "peer": "p", **MEASURED},
            {"workload": "w", "variant": "v", "peer": "q", "status": "not run", "reason": "absent"},
        ],
    },
    "b.json": {
        "environment": {"date": "2026-01-02"},
        "elements": 7,
        "seeds": {
            str(seed): {"ours": [{"step": 9, "parameter": error, "update": error, "second moment": error}]}
            for seed, error in enumerate((1e-7, 3e-7))
        },
    },
    "c.json": {
        "environment": {"date": "2026-01-03"},
        "runs": [
            {"suite": "cuda", "task": "t", **GPU, "compiler": "nvrtc", "dtype": "bf16", "status": "passed"},
            {"suite": "x", **GPU, "compiler": "ptx", "dtype": None, "status": "passed", "simulation": True},
            {"suite": "cuda", "device": "AMD Y", "compiler": "ptx", "dtype": "fp32", "status": "failed"},
        ],
    },
    "d.json": {"environment": {"date": "2026-01-04"}, "what": "something new"},
    "f.json": {
        "environment": {"date": "2026-01-06"},
        "elements per rank": 8,
        "kinds": {"sum": "the sum over ranks"},
        "measured": [{"processes": 4, "sum": {"median": 30.4, "min": 20.0, "max": 99.6}}],
    },
    "g.json": {
        "environment": {"date": "2026-01-07"},
        "what": "an agent, whole trainings",
        "quality": "mean return",
        "steps": 2000,
        "ours": "ours",
        "trainings": [
            {
                "optimizer": name,
                "seed": seed,
                "seconds": 9 * seconds,
                "processor seconds": seconds,
                "foreign load": 0.25,
                "updates": 2.0,
                "quality": q,
            }
            for seed, pair in enumerate([(4.0, 2.0), (9.0, 3.0), (5.0, 2.0)])
            for name, seconds, q in zip(("theirs", "ours"), pair, (10.0, 20.0 + seed), strict=True)
        ],
    },
    "e.json": {"environment": {"date": "2026-01-05"}, "settings": {"quick": True}, "comparisons": []},
}


def test_generated_benchmarks_show_every_kind_of_file() -> None:
    text = generator().benchmarks(REPORTS)
    assert "| plain | a peer | 1.5 | 1.5 | 1.50 (1.25 to 2.00) |  | 15 |" in text
    assert "| another | not run | absent | 1 |" in text
    assert "| ours | 9 | 3.0e-07 | 3.0e-07 | 3.0e-07 |" in text, "the worst seed"
    assert "something new" in text
    assert "| 4 | 30 (20 to 100) |" in text
    assert "smoke test" in text
    assert "An agent, whole trainings, 2,000 steps, 3 seeds." in text
    assert "Other processes used 25% of the machine's processors." in text
    assert "| theirs | 45.0 (36.0 to 81.0) | 5.0 (4.0 to 9.0) | 2.0 | 2.50 (2.00 to 3.00) | 10, 10, 10 |" in text
    assert "| ours | 18.0 (18.0 to 27.0) | 2.0 (2.0 to 3.0) | 2.0 |  | 20, 21, 22 |" in text


def test_a_page_gets_the_tables_that_it_asks_for_and_nothing_else_of_it_changes() -> None:
    page = "before\n<!-- from benchmarks/results/{} -->\nold\n<!-- end -->\nafter\n"
    filled = generator().with_results(page.format("g.json") + page.format("none.json"), REPORTS)
    assert filled.startswith(
        "before\n<!-- from benchmarks/results/g.json -->\n\n`benchmarks/results/g.json`, 2026-01-07"
    )
    assert "| theirs |" in filled
    assert "old" not in filled
    assert filled.endswith(
        "before\n<!-- from benchmarks/results/none.json -->\n\nNot measured yet.\n\n<!-- end -->\nafter\n"
    )
    assert generator().with_results(filled, REPORTS) == filled


def test_generated_status_counts_hardware_runs_only() -> None:
    text = generator().status(REPORTS)
    assert "| cuda | t | NVIDIA X | nvrtc | bf16 | **passed** | 2026-01-03 | `c.json` |" in text
    assert "| x |  | NVIDIA X | ptx |  | **passed** (simulation) | 2026-01-03 | `c.json` |" in text
    assert "| NVIDIA | nvrtc | fp32" not in text
    unmeasured = "| fp32, fp16, bf16 | not yet measured on hardware |"
    assert f"| NVIDIA | ptx {unmeasured}" in text, "a simulation is no measurement"
    assert f"| AMD | ptx {unmeasured}" in text, "a failure is none either"


def test_pictures_are_those_of_the_script(tmp_path: pathlib.Path) -> None:
    subprocess.run([sys.executable, DOCS / "make_pictures.py", tmp_path], check=True, timeout=60)
    drawn = sorted(path.name for path in tmp_path.iterdir())
    assert drawn == sorted(path.name for path in (DOCS / "pictures").glob("*.svg"))
    for name in drawn:
        assert (tmp_path / name).read_text() == (DOCS / "pictures" / name).read_text(), f"{name}: run make_pictures.py"


def test_traffic_in_the_picture_is_that_of_the_benchmark() -> None:
    drawn = {title: read + written for title, read, written in script(DOCS / "make_pictures.py").TRAFFIC}
    variants = script(ROOT / "benchmarks" / "workloads.py").VARIANTS
    for title, variant in (
        ("fused AdamW", "plain"),
        ("fused AdamW, clipped", "clip"),
        ("fused AMSGrad", "amsgrad"),
        ("BF16 parameter, FP32 master", "bf16"),
    ):
        assert drawn[title] == variants[variant].bytes_per_element, title
    for title, dtype, master, form in (
        ("BF16 parameter, split master", "bfloat16", "split", "float32"),
        ("FP32, moments in BF16", "float32", "none", "bfloat16"),
        ("FP32, moments packed", "float32", "none", "packed16"),
        ("BF16, split master, BF16 moments", "bfloat16", "split", "bfloat16"),
        ("BF16, split master, packed", "bfloat16", "split", "packed16"),
    ):
        (row,) = estimate(dtype, masters=master, moments=form)
        assert drawn[title] == row.traffic, title


def raised_texts() -> list[str]:
    """The text of every raise in src and in the build (some stand in constants), each inserted value as an ellipsis."""
    found = []
    for path in (*(ROOT / "src").rglob("*.py"), *(ROOT / "cmake").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.Raise, ast.Return, ast.Assign)) or (
                isinstance(node, ast.Call) and "warn" in ast.dump(node.func)
            ):
                found += [literal(part) for part in ast.walk(node) if isinstance(part, (ast.JoinedStr, ast.Constant))]
    return found


def literal(node: ast.AST) -> str:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    return "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in parts)


def test_messages_quoted_on_the_error_page_are_raised() -> None:
    texts = raised_texts()
    tables = re.findall(r"^\| Message .*\n(?:\|.*\n)+", (DOCS / "errors.md").read_text(encoding="utf-8"), re.MULTILINE)
    quoted = re.findall(r"^\| `([^`]+)` \|", "".join(tables), re.MULTILINE)
    assert len(quoted) > 20
    for message in quoted:
        assert any(message in text for text in texts), f"nothing in src says {message!r}"


def test_every_error_class_is_on_the_error_page() -> None:
    from ruda_optim.fused_adamw import errors

    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    for name, value in vars(errors).items():
        if isinstance(value, type) and issubclass(value, Exception):
            assert f"`{name}`" in page, f"{name} is missing"


def test_every_public_name_is_in_the_reference() -> None:
    import ruda_optim.fused_adamw
    import ruda_torch

    page = (DOCS / "api.md").read_text(encoding="utf-8")
    for module in (ruda_torch, ruda_optim.fused_adamw):
        for name in module.__all__:
            assert re.search(rf"^::: {re.escape(module.__name__)}\.{name}$", page, re.MULTILINE), name
