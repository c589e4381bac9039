"""The PyTorch fixtures through any kernels of ours.

Run as a program it checks the CPU operator, whose instruction set a process chooses once:
``RUDA_CPU_LEVEL=3 python tests/support/fixture_runs.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from cases import FIXTURE_CASES, check, initial_parameter, stored_gradient, to_torch

from fused_adamw import oracle
from ruda_optim.fused_adamw.storage import LaunchTable, TensorMemory, coefficient_table, cpu_level, select

if TYPE_CHECKING:
    from ruda_optim.fused_adamw.storage import Kernels

CPU = torch.device("cpu")
MOMENTS = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")


def check_fixture(kernels: Kernels, index: int, device: torch.device = CPU) -> None:
    """All steps of one fixture in place; AssertionError unless each is as near to torch's as rounding allows."""
    case = FIXTURE_CASES[index]
    tensors = {"parameter": to_torch(initial_parameter(case)).to(device)}
    for name in MOMENTS[: 2 + case.options.amsgrad]:  # NaN: the first step must not read them
        tensors[name] = to_torch(np.full(case.shape, np.nan)).to(device)
    for want in oracle.targets(case, oracle.load()[index]):
        gradient = to_torch(stored_gradient(case, want.step), case.gradient_dtype).to(device)
        table = LaunchTable([TensorMemory(gradient, first=want.step == 1, **tensors)], device)
        row = coefficient_table([case.options.prepare_step(want.step - 1)])
        kernels.adamw_scaled(table, row, case.control.inverse_scale, 1.0)
        check(case, want, tensors)


def main() -> None:
    for index in range(len(FIXTURE_CASES)):
        check_fixture(select(CPU), index)
    print(cpu_level())


if __name__ == "__main__":
    main()
