"""``decide``, and the two calls around it, against a model in Python: the decision of a step is taken on the device.

Runs on the simulated device backends: see ``simulated_backend``. No test here has seen a GPU.
"""

from __future__ import annotations

import math
from itertools import product

import pytest
import simulated_backend
import torch

from ruda_optim.fused_adamw import AdamWOptions, GradientGuardOptions, GradientStats, ShapeMismatch
from ruda_optim.fused_adamw.kernels.decision import DECISION, HYPERPARAMETERS, DecisionMemory
from ruda_optim.fused_adamw.kernels.tables import COEFFICIENTS, Field, LaunchTable, TensorMemory

pytestmark = [
    pytest.mark.skipif(simulated_backend.unavailable() is not None, reason=str(simulated_backend.unavailable())),
    # NumPy, which Triton's interpreter computes with, warns of the infinities and NaNs that some cases are about.
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
CPU = torch.device("cpu")
NAN, INF = math.nan, math.inf
GUARD_EPSILON = 1e-6
OPTIONS = (
    AdamWOptions(learning_rate=1e-2, weight_decay=0.1, epsilon=1e-8),
    AdamWOptions(learning_rate=0.5, beta1=0.0, beta2=0.5, epsilon=1.0, weight_decay=0.0, maximize=True),
)


@pytest.fixture(scope="module")
def kernels():
    return simulated_backend.kernels()


def decision_memory(max_norm: float = -1.0, report: list[float] | None = None) -> DecisionMemory:
    """What a step hands to ``decide``. What the call has to write holds NaN, or numbers that cannot be right."""
    rows = [
        (o.learning_rate, o.beta1, o.beta2, o.epsilon, o.weight_decay, -1.0 if o.maximize else 1.0) for o in OPTIONS
    ]
    hyperparameters = torch.full((len(rows), HYPERPARAMETERS), NAN, dtype=torch.float64)
    hyperparameters[:, :6] = torch.tensor(rows, dtype=torch.float64)
    hyperparameters[0, 6:] = torch.tensor([max_norm, GUARD_EPSILON], dtype=torch.float64)
    return DecisionMemory(
        hyperparameters=hyperparameters,
        report=torch.tensor([7.0, 7.0, 7.0] if report is None else report, dtype=torch.float64),
        decision=torch.full((DECISION,), NAN),
        counts=torch.tensor([40, 3]),
    )


class Model:
    """A table of ``count`` small tensors of two groups, and their step counters."""

    def __init__(self, count: int, steps: int = 0) -> None:
        random = torch.Generator().manual_seed(count)
        self.counters = torch.full((count,), float(steps))
        if count > 1:
            self.counters[1] = steps + 5
        self.memories = [
            TensorMemory(*(torch.rand(3, generator=random) for _ in range(4)), step=counter)
            for counter in self.counters.unbind()
        ]
        self.gradients = [memory.gradient for memory in self.memories]
        self.table = LaunchTable(self.memories, CPU)
        self.table.fields[Field.COEFFICIENTS] = torch.arange(count) % len(OPTIONS)
        self.coefficients = torch.full((count, COEFFICIENTS), NAN)


def decided(report: list[float], max_norm: float, *, measured: bool, check_finite: bool, found: float):
    """(skip, clip factor) as ``Kernels.decide`` promises."""
    bad, scale, sumsq = report
    if found > 0 or (measured and check_finite and bad):
        return 1.0, 1.0
    if not measured or max_norm < 0 or max_norm == INF:
        return 0.0, 1.0
    if bad:
        return 0.0, 0.0
    stats = GradientStats.from_report(0.0, scale, sumsq, elements=1, tensors=1, gradient_scale=1.0)
    return 0.0, stats.decision(GradientGuardOptions(max_norm=max_norm, epsilon=GUARD_EPSILON)).clip_factor


REPORTS = (
    [0.0, 2.0, 3.0],
    [0.0, 0.0, 0.0],
    [1.0, 2.0, 3.0],
    [0.0, 3e38, 1e6],
    [0.0, 1e-45, 1.0],
    [0.0, 1.5, 0.1 + 0.2],
)


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, 0.5, 1e30, INF])
@pytest.mark.parametrize("report", REPORTS, ids=str)
def test_a_given_report_decides_as_gradient_stats(kernels, report: list[float], max_norm: float) -> None:
    for check_finite, found in product((True, False), (None, 0.0, 2.0, INF, NAN)):
        model, memory = Model(3), decision_memory(max_norm, list(report))
        found_inf = None if found is None else torch.tensor([found])
        kernels.decide(
            model.table, memory, model.coefficients, None, 0.25, measured=True, check_finite=check_finite,
            found_inf=found_inf,
        )  # fmt: skip
        skip, clip = decided(report, max_norm, measured=True, check_finite=check_finite, found=found or 0.0)
        assert memory.decision.tolist() == [skip, clip, 0.25, 0.0], (check_finite, found)
        assert memory.report.tolist() == [1.0 if (found or 0.0) > 0 else report[0], *report[1:]]
        assert memory.counts.tolist() == ([41, 4] if skip else [40, 0])
        assert model.counters.tolist() == [1.0 - skip, 6.0 - skip, 1.0 - skip]


@pytest.mark.parametrize("max_norm", [-1.0, 0.0, INF])
@pytest.mark.parametrize("found", [None, 0.0, 1.0])
def test_a_step_that_measured_nothing(kernels, max_norm: float, found: float | None) -> None:
    """Nothing is clipped, and the report says that nobody looked."""
    model, memory = Model(3), decision_memory(max_norm)
    kernels.decide(
        model.table, memory, model.coefficients, None, 1.0, measured=False, check_finite=True,
        found_inf=None if found is None else torch.tensor([found]),
    )  # fmt: skip
    skip = float(bool(found))
    assert memory.decision.tolist() == [skip, 1.0, 1.0, 0.0]
    assert memory.report[0] == skip
    assert memory.report[1:].isnan().all()
    assert model.counters.tolist() == [1.0 - skip, 6.0 - skip, 1.0 - skip]


def random_rows(count: int, bad: bool) -> torch.Tensor:
    """Rows of every magnitude, a zero row among them."""
    random = torch.Generator().manual_seed(count)
    scale = 10.0 ** (torch.rand(count, generator=random) * 60 - 30)
    rows = torch.stack((scale, 1 + 8191 * torch.rand(count, generator=random), torch.zeros(count)), 1)
    rows[count // 2 : count // 2 + 1, :2] = 0.0
    if bad:
        rows[-1, 2] = 1.0
    return rows


@pytest.mark.parametrize("count", [0, 1, 7, 256, 1025, 15_000])
@pytest.mark.parametrize("bad", [False, True])
def test_rows_are_merged_and_decided_in_one_call(kernels, count: int, bad: bool) -> None:
    bad = bad and count > 0
    rows = random_rows(count, bad)
    model, memory = Model(3), decision_memory(1e20)
    kernels.decide(model.table, memory, model.coefficients, rows, 1.0, measured=True, check_finite=False)
    if count:
        merged = torch.empty(3)
        kernels.merge_gradient_stats(rows, merged)
        assert memory.report.tolist() == merged.tolist(), "one block's merge, bit for bit"
    wanted = rows.double()
    scale = float(wanted[:, 0].max()) if count else 0.0
    sumsq = float((wanted[:, 1] * (wanted[:, 0] / (scale or 1.0)) ** 2).sum())
    assert memory.report.tolist()[:2] == [float(bad), scale]
    # Each row's term is three FP32 roundings, the sum one more: all relative to positive terms.
    assert memory.report[2].item() == pytest.approx(sumsq, rel=4 * 2**-24)
    assert memory.report[2].item() == memory.report[2].float().item(), "rounded to FP32"
    report = memory.report.tolist()
    skip, clip = decided(report, 1e20, measured=True, check_finite=False, found=0.0)
    assert memory.decision.tolist() == [skip, clip, 1.0, 0.0]


@pytest.mark.skipif(simulated_backend.INTERPRETED, reason="the interpreter takes a minute for them")
def test_four_million_rows(kernels) -> None:
    rows = torch.tensor([1.0, 2.0, 0.0]).repeat(1 << 22, 1)
    rows[-1] = torch.tensor([2.0, 5.0, 1.0])
    model, memory = Model(1), decision_memory(1.0)
    kernels.decide(model.table, memory, model.coefficients, rows, 1.0, measured=True, check_finite=True)
    assert memory.report.tolist() == [1.0, 2.0, float(torch.tensor(((1 << 22) - 1) * 0.5 + 5.0, dtype=torch.float32))]
    assert memory.decision[0] == 1.0


@pytest.mark.parametrize("steps", [0, 1, 9, 999, 10**6, 2**24 - 8])
def test_coefficients_are_the_hosts(kernels, steps: int) -> None:
    """300 tensors: more than one round of the program's threads."""
    model, memory = Model(300, steps), decision_memory()
    kernels.decide(model.table, memory, model.coefficients, None, 1.0, measured=False, check_finite=False)
    for i in range(300):
        completed = steps + 5 if i == 1 else steps
        assert model.counters[i] == completed + 1
        wanted = torch.tensor(OPTIONS[i % 2].prepare_step(completed).row)
        # 1 - beta^t: powers by squaring and by the library differ by at most 64 ulps of FP64, which 1 - beta^t >= 1e-3
        # makes 1e-11 at most: the FP32 results are equal or neighbours.
        torch.testing.assert_close(model.coefficients[i], wanted, rtol=2.0**-23, atol=0)


def test_a_table_without_tensors_has_a_decision(kernels) -> None:
    memory = decision_memory(0.5, [0.0, 3.0, 1.0])
    kernels.decide(
        LaunchTable([], CPU), memory, torch.empty(0, COEFFICIENTS), None, 0.5, measured=True, check_finite=True
    )
    assert memory.decision.tolist() == [0.0, float(torch.tensor(0.5 / 3.000001)), 0.5, 0.0]
    assert memory.counts.tolist() == [40, 0]


@pytest.mark.parametrize("scale", [1.0, 3.0, 65536.0, 2.0**-24])
def test_a_loss_scale_on_the_device(kernels, scale: float) -> None:
    """Measure, decide and update see the FP32 reciprocal that the host would have passed."""
    inverse = float(1 / torch.tensor([scale]))
    results = []
    for scaled in (True, False):
        model, memory = Model(3), decision_memory(0.5)
        rows = torch.full((3, 3), NAN)
        given = {"scale": torch.tensor([scale])} if scaled else {}
        passed = NAN if scaled else inverse
        kernels.analyze_gradient(model.table, rows, passed, **given)
        kernels.decide(model.table, memory, model.coefficients, rows, passed, measured=True, check_finite=True, **given)
        decision = memory.decision
        assert decision[2] == inverse
        kernels.adamw_scaled(model.table, model.coefficients, NAN, NAN, decision=decision)
        wanted = [memory.parameter.clone() for memory in model.memories]
        results.append([rows, memory.report, decision, *wanted])
    for left, right in zip(*results, strict=True):
        assert torch.equal(left, right)
        assert not left.isnan().any()


def test_the_update_does_as_decided(kernels) -> None:
    """The host's update with the same numbers has the same bits; a skip leaves every byte."""
    for found in (0.0, 1.0):
        model, memory = Model(20, 4), decision_memory(0.5, [0.0, 2.0, 3.0])
        flag = torch.tensor([found])
        kernels.decide(
            model.table, memory, model.coefficients, None, 0.5, measured=True, check_finite=True, found_inf=flag
        )
        host = Model(20, 4)
        if not found:
            host.table.fields[Field.COEFFICIENTS] = torch.arange(20)
            kernels.adamw_scaled(host.table, model.coefficients, 0.5, float(memory.decision[1]))
        kernels.adamw_scaled(model.table, model.coefficients, NAN, NAN, decision=memory.decision)
        for ours, wanted in zip(model.memories, host.memories, strict=True):
            for name in ("parameter", "exp_avg", "exp_avg_sq"):
                assert torch.equal(getattr(ours, name), getattr(wanted, name)), name


def test_what_does_not_fit_is_refused_before_anything_is_written(kernels) -> None:
    model, memory = Model(3), decision_memory(1.0, [0.0, 2.0, 3.0])
    rows = torch.ones(3, 3)
    with pytest.raises(ShapeMismatch, match=r"row of \d+ coefficients for each of 3 tensors, got shape \(2, 8\)"):
        kernels.decide(model.table, memory, torch.empty(2, 8), None, 1.0, measured=True, check_finite=True)
    with pytest.raises(ShapeMismatch, match="measured=False"):
        kernels.decide(model.table, memory, model.coefficients, rows, 1.0, measured=False, check_finite=True)
    with pytest.raises(ShapeMismatch, match=r"rows of 3 numbers .* strides \(1, 3\)"):
        kernels.decide(model.table, memory, model.coefficients, rows.T, 1.0, measured=True, check_finite=True)
    assert memory.decision.isnan().all()
    assert model.counters.tolist() == [0.0, 5.0, 0.0]
