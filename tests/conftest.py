"""Hypothesis profiles: "standard" in `make test`, "nightly" in `make test-nightly`."""

from __future__ import annotations

from hypothesis import settings

# The same examples in every run, so that a change fails its own test and not a later one; no deadline, because a loaded
# machine is not a bug. The nightly run draws new examples each time.
settings.register_profile("standard", max_examples=300, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=20_000, deadline=None, print_blob=True)
settings.load_profile("standard")
