"""The host modules where torch cannot be imported: the proof that options, reference and plan need none.

Imports of torch, Triton and the CUDA bindings raise here. Everything that is imported below would fail if it, or
anything it imports, asked for one of them. Then the reference is compared with the PyTorch fixtures, and the plan and
the options are used.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FORBIDDEN = ("torch", "triton", "cuda")


class Forbidden(MetaPathFinder):
    """Refuses the packages of ``FORBIDDEN``."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name.partition(".")[0] in FORBIDDEN:
            raise ImportError(f"{name} must not be imported here")


def main() -> None:
    loaded = sorted(set(FORBIDDEN) & set(sys.modules))
    if loaded:
        raise SystemExit(f"{', '.join(loaded)} was imported before the check began: it would prove nothing")
    sys.meta_path.insert(0, Forbidden())
    sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests" / "support")]
    import numpy as np
    from cases import FIXTURE_CASES

    from fused_adamw import oracle
    from ruda_optim.fused_adamw import AdamWOptions, GradientGuardOptions, StatsPlan, StepControl, errors, reference

    for case, entry in zip(FIXTURE_CASES, oracle.load(), strict=True):
        oracle.check_against_reference(case, entry)
    print(f"the reference agrees with PyTorch's results in {len(FIXTURE_CASES)} cases")

    stats = reference.gradient_stats([np.array([3.0, 4.0])], 1.0)
    assert stats.total_norm == 5.0, stats
    assert abs(stats.decision(GradientGuardOptions(max_norm=1.0)).clip_factor - 0.2) < 1e-6
    try:
        AdamWOptions(beta1=1.0)
    except errors.InvalidOption as error:
        print(f"a bad option is refused: {error}")
    else:
        raise AssertionError("beta1 = 1 was accepted")
    assert AdamWOptions().prepare_step(0, StepControl(2.0)).row
    plan = StatsPlan.new(4_194_304)
    assert plan.scratch_elements * 4 == 49_200, plan
    assert len(plan.stages) == 2, plan
    loaded = sorted(set(FORBIDDEN) & set(sys.modules))
    assert not loaded, f"imported: {loaded}"
    print(f"not imported: {', '.join(FORBIDDEN)}")


if __name__ == "__main__":
    main()
