"""Hypothesis profiles ("standard" in `make test`, "nightly" in `make test-nightly`), and who runs which tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# Parallel test processes share the cores; without this each of them would use all of them, and wait for the others.
# Tests of several threads ask for their number themselves.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    share = (os.cpu_count() or 1) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))

# The same examples in every run, so that a change fails its own test and not a later one; no deadline, because a loaded
# machine is not a bug. The nightly run draws new examples each time.
settings.register_profile("standard", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
settings.load_profile("standard")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the marks
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Tests that share a module's expensive set-up stay in one process; `--dist loadgroup` balances all others."""
    if not config.pluginmanager.hasplugin("xdist"):
        return
    for item in items:
        definitions = item._fixtureinfo.name2fixturedefs if isinstance(item, pytest.Function) else {}
        if any(found.scope == "module" for chain in definitions.values() for found in chain):
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
