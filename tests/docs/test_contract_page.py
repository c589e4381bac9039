"""docs/contract.md: every promise is held by a test that exists, and the lines can be handed to pytest."""

from __future__ import annotations

import ast
import functools
import re

import pytest
from docs_pages import DOCS, ROOT, blocks, prose

PAGE = (DOCS / "contract.md").read_text(encoding="utf-8")
PROMISES = [int(number) for number in re.findall(r"^\| (\d+) \|", prose(PAGE), re.MULTILINE)]
HELD = [line.split() for block in blocks(PAGE) if block.title == "held by" for line in block.body.splitlines()]


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def test_every_promise_has_a_number_and_a_test() -> None:
    assert list(range(1, len(PROMISES) + 1)) == PROMISES
    assert [int(number) for number, _ in HELD] == sorted(int(number) for number, _ in HELD)
    assert {int(number) for number, _ in HELD} == set(PROMISES)


@pytest.mark.parametrize("test", sorted({test for _, test in HELD}))
def test_the_test_exists(test: str) -> None:
    """A check that a process of a sharded run makes is a function of its name in tests/sharding/sharded_*.py."""
    file, _, name = test.partition("::")
    assert (ROOT / file).exists(), f"docs/contract.md names {file}, which does not exist"
    assert name in functions(file), f"docs/contract.md names {name}, which {file} does not have"
    assert name.startswith("test_") or file.startswith("tests/sharding/sharded_")
