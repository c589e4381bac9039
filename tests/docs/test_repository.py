"""The files that a code host and its readers look for say what the rest of the repository says."""

from __future__ import annotations

import re

import pytest
from docs_pages import ROOT

import ruda_optim
import ruda_torch

yaml = pytest.importorskip("yaml", reason="PyYAML is not installed (it comes with mkdocs: make venv)")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def test_one_version_everywhere() -> None:
    stated = re.search(r'^version = "([^"]+)"$', read("pyproject.toml"), re.MULTILINE)[1]
    assert ruda_optim.__version__ == ruda_torch.__version__ == stated
    assert str(yaml.safe_load(read("CITATION.cff"))["version"]) == stated
    assert re.search(rf"^## \[.*{re.escape(stated)}", read("CHANGELOG.md"), re.MULTILINE)


def test_the_citation_has_what_the_format_requires() -> None:
    """Citation File Format 1.2.0."""
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= citation.keys()
    for work in (citation, *citation["references"]):
        assert {"title", "authors"} <= work.keys()
        assert all("name" in author or "family-names" in author for author in work["authors"])


def test_issues_ask_for_the_machines_report() -> None:
    form = yaml.safe_load(read(".github/ISSUE_TEMPLATE/bug.yml"))
    assert {"name", "description", "body"} <= form.keys()
    fields = {part["id"]: part for part in form["body"]}
    assert len(fields) == len(form["body"])
    assert "ruda-optim check --json" in fields["check"]["attributes"]["label"]
    assert fields["check"]["validations"]["required"] is True


def test_the_hooks_before_a_commit_are_the_linters() -> None:
    lint = re.search(r"^lint: venv\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)[1]
    linters = re.findall(r"\$\(BIN\)/([\w-]+(?: (?:check|format))?)", lint)
    hooks = [hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    assert [re.search(r"\.venv/bin/([\w-]+(?: (?:check|format))?)", hook["entry"])[1] for hook in hooks] == linters


def test_the_contributing_page_names_every_target() -> None:
    targets = re.search(r"^\.PHONY: (.*)$", read("Makefile"), re.MULTILINE)[1].split()
    commands = read("CONTRIBUTING.md")
    for target in targets:
        assert f"`make {target}" in commands, f"CONTRIBUTING.md does not name make {target}"
