"""The site: it builds without a warning, and a real browser finds nothing broken, cut or out of its place."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "docs"))
import check_site  # noqa: E402 - a script, not a package

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason="mkdocs is not installed (make venv)"
)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("site")
    # Not --quiet: it would hide warnings from --strict as well.
    result = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=ROOT, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True, timeout=300,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    assert "WARNING" not in result.stderr
    return folder


def test_site_says_its_version(site: pathlib.Path) -> None:
    from ruda_torch import __version__

    for page in site.rglob("index.html"):
        assert re.search(rf"<title>[^<]*ruda-optim {re.escape(__version__)}<", page.read_text()), page


def test_no_docstring_reads_as_a_quotation(site: pathlib.Path) -> None:
    """Markdown takes a line that begins with "> 1" for one."""
    assert "<blockquote" not in (site / "api" / "index.html").read_text()


@pytest.mark.integration
@pytest.mark.skipif(check_site.browser() is None, reason="no browser (apt-get install chromium, or set CHROMIUM)")
def test_pages_in_a_browser(site: pathlib.Path) -> None:
    pytest.importorskip("playwright", reason="playwright is not installed (make test-integrations)")
    assert not check_site.look(site)


BROKEN = """<!doctype html><meta name="viewport" content="width=device-width"><article>
<table style="table-layout: fixed; width: 60px; word-break: break-all"><tr><td>exp_avg_squared_max</td></tr></table>
<img src="cut.svg" width="200"><img src="absent.png" width="20"><img src="whole.svg" width="50" height="90">
<p style="width: 2000px">wide</p><div style="overflow: auto; width: 50px"><p style="width: 90px">rolls</p></div>
<img src="https://example.invalid/x.png" width="20"></article>"""
SVG = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><rect width="20" height="10" fill="white"/>{}</svg>'


@pytest.mark.integration
@pytest.mark.skipif(check_site.browser() is None, reason="no browser (apt-get install chromium, or set CHROMIUM)")
def test_the_look_finds_what_is_broken(tmp_path: pathlib.Path) -> None:
    pytest.importorskip("playwright", reason="playwright is not installed (make test-integrations)")
    (tmp_path / "index.html").write_text(BROKEN)
    (tmp_path / "whole.svg").write_text(SVG.format(""))
    (tmp_path / "cut.svg").write_text(SVG.format('<path d="M 5 5 V 12" stroke="black"/>'))
    found = "\n".join(check_site.look(tmp_path))
    for fault in (
        'a table breaks "exp_avg_squared_max"', "cut.svg is cut", "absent.png is missing", "whole.svg is squeezed",
        "the page scrolls sideways", "<p class=\"\"> is too wide: wide", "<div class=\"\"> scrolls sideways",
        "asks somebody else: https://example.invalid/x.png",
    ):  # fmt: skip
        for device in check_site.WIDTHS:
            assert f". on a {device}: {fault}" in found
