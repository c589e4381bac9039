"""Gradient statistics and the guarded step: every line of their contracts."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from allocations import record
from cases import (
    CASES,
    FLAT_CASES,
    Case,
    U,
    check,
    compare,
    expected,
    initial_parameter,
    norm_relative_bound,
    stored_gradient,
    to_torch,
)
from kernel_runs import CHAIN, same_bits
from step_inputs import BAD_TENSORS, GOOD, META, NEGATED, OPTIONS, SPARSE, filled, parts, state_of

from ruda_optim.fused_adamw import (
    AdamWOptions,
    AdamWState,
    DifferentDevice,
    GradientGuardOptions,
    InvalidOption,
    InvalidTensor,
    NonFiniteGradients,
    NonFinitePolicy,
    StepControl,
    StepOverflow,
    adamw_step,
    gradient_stats,
    guarded_adamw_step,
    reference,
)

# ------------------------------------------------------------------------------------------------ gradient_stats


def test_statistics_are_those_of_all_gradients_concatenated() -> None:
    random = np.random.default_rng(0)
    arrays = [random.standard_normal(shape).astype(np.float32) for shape in ((3, 4), (70_000,), (), (2, 0), (1, 7))]
    tensors = [torch.from_numpy(array) for array in arrays]
    tensors[0] = tensors[0].t().contiguous().t()
    stats = gradient_stats(tensors, 8.0)
    want = reference.gradient_stats([np.concatenate([array.reshape(-1) for array in arrays])], 8.0)
    bound = norm_relative_bound(chain=CHAIN, levels=1) * want.total_norm
    compare("norm", np.float64(stats.total_norm), want.total_norm, bound)
    assert stats.max_finite_abs == want.max_finite_abs
    assert (stats.all_finite, stats.elements, stats.gradient_scale) == (True, 70_020, 8.0)
    assert stats.tensors == 5


@pytest.mark.parametrize("gradients", [[], [torch.empty(0)], [torch.empty(2, 0, 3), torch.empty(0)]], ids=len)
def test_statistics_of_nothing(gradients) -> None:
    stats = gradient_stats(gradients)
    assert (stats.total_norm, stats.max_finite_abs, stats.all_finite, stats.elements) == (0.0, 0.0, True, 0)
    assert stats.tensors == len(gradients)
    assert stats.decision(GradientGuardOptions()).clip_factor == 1.0


def test_statistics_of_bad_gradients() -> None:
    stats = gradient_stats([filled(2.0), torch.tensor([1.0, np.nan])])
    assert (stats.total_norm, stats.max_finite_abs, stats.all_finite) == (math.inf, 2.0, False)
    overflow = gradient_stats([torch.tensor([3e38])], 0.5)
    assert (overflow.total_norm, overflow.all_finite) == (math.inf, False)


def test_statistics_neither_overflow_nor_vanish() -> None:
    large = gradient_stats([filled(3e38, 10_000)])
    compare("large", np.float64(large.total_norm), 100 * float(np.float32(3e38)), 3e40 * norm_relative_bound(CHAIN, 1))
    small = gradient_stats([filled(1e-44, 10_000)])
    compare(
        "small", np.float64(small.total_norm), 100 * float(np.float32(1e-44)), 1e-42 * norm_relative_bound(CHAIN, 1)
    )


def test_statistics_only_read() -> None:
    gradients = [torch.linspace(-1, 1, 50), torch.linspace(-1, 1, 50).bfloat16()]
    kept = [gradient.clone() for gradient in gradients]
    versions = [gradient._version for gradient in gradients]
    gradient_stats(gradients)
    assert all(map(same_bits, gradients, kept))
    assert [gradient._version for gradient in gradients] == versions


def test_statistics_take_any_iterable() -> None:
    assert gradient_stats(filled(3.0, 1) for _ in range(16)).total_norm == 12.0
    assert gradient_stats((filled(3.0, 1), filled(4.0, 1))).total_norm == 5.0


@pytest.mark.parametrize(
    ("gradients", "scale", "error", "message"),
    [
        (filled(1.0), 1.0, InvalidTensor, r"sequence of tensors, got Tensor; pass \[tensor\]"),
        (None, 1.0, InvalidTensor, r"sequence of tensors, got NoneType"),
        (3.0, 1.0, InvalidTensor, r"sequence of tensors, got float"),
        ([None], 1.0, InvalidTensor, r"gradients\[0\] must be a float32, float16, bfloat16 tensor, got NoneType"),
        ([filled(1.0), 2.0], 1.0, InvalidTensor, r"gradients\[1\] must be .* got float"),
        ([torch.nn.Parameter(filled(1.0))], 1.0, InvalidTensor, r"is a Parameter; pass its gradient"),
        ([filled(1.0, dtype=torch.float64)], 1.0, InvalidTensor, r"got torch.float64"),
        ([filled(1.0), SPARSE], 1.0, InvalidTensor, r"gradients\[1\] must be a dense"),
        ([NEGATED], 1.0, InvalidTensor, r"lazily negated view"),
        ([filled(1.0), META], 1.0, DifferentDevice, r"gradients\[0\] is on cpu, gradients\[1\] on meta"),
        ([META], 1.0, InvalidTensor, r"got 'meta'"),
        ([filled(1.0)], 0.0, InvalidOption, r"gradient_scale must be a finite number > 0, got 0.0"),
        ([filled(1.0)], 1e-45, InvalidOption, r"reciprocal"),
        ([filled(1.0)], "8", InvalidOption, r"gradient_scale must be"),
    ],
)
def test_statistics_refuse(gradients, scale, error, message) -> None:
    with pytest.raises(error, match=message):
        gradient_stats(gradients, scale)


# ------------------------------------------------------------------------------------------- guarded_adamw_step

GUARDED = [
    case
    for case in CASES
    if case.parameter_dtype == "float32" and case.layout in ("contiguous", "misaligned") and case.max_norm is not None
]


@pytest.mark.parametrize("case", GUARDED, ids=str)
def test_guarded_values_lie_within_their_bounds(case) -> None:
    parameters, state = to_torch(initial_parameter(case), layout=case.layout), None
    norm_error = norm_relative_bound(chain=CHAIN, levels=1)
    for want in expected(case, norm_error=norm_error):
        gradients = to_torch(stored_gradient(case, want.step), case.gradient_dtype, case.gradient_layout)
        result = guarded_adamw_step([(parameters, gradients, state)], case.options, case.control, case.guard)
        compare(
            "clip", np.float64(result.decision.clip_factor), want.clip_factor, want.clip_factor * (norm_error + 2 * U)
        )
        (update,) = result.updates
        parameters, state = update.parameters, update.state
        check(case, want, parts(update))


def group() -> list[tuple[torch.Tensor, torch.Tensor, AdamWState | None]]:
    """Different shapes, gradient dtypes and step counts; an empty tensor in between."""
    return [
        (torch.linspace(1, 2, 6).view(2, 3), torch.linspace(-3, 5, 6).view(2, 3), None),
        (torch.empty(0), torch.empty(0), None),
        (torch.linspace(1, 2, 1030), torch.linspace(-1, 1, 1030).bfloat16(), state_of(7, shape=(1030,))),
        (torch.tensor(2.0), torch.tensor(1.5, dtype=torch.float16), state_of(2**40, shape=())),
    ]


def test_one_global_norm_clips_the_whole_group() -> None:
    entries = group()
    guard = GradientGuardOptions(max_norm=0.5)
    control = StepControl(gradient_scale=4.0)
    recorded = record(lambda: guarded_adamw_step(entries, OPTIONS, control, guard))
    result = recorded.result
    assert recorded.count("adamw_scaled") == 1, "one update launch for the whole group"
    assert recorded.count("analyze_gradient") == 1
    gradients = [entry[1].float().numpy() for entry in entries]
    stats = reference.gradient_stats(gradients, 4.0)
    compare(
        "norm", np.float64(result.stats.total_norm), stats.total_norm, norm_relative_bound(CHAIN, 1) * stats.total_norm
    )
    assert (result.stats.elements, result.stats.tensors) == (1037, 4)
    assert result.decision == result.stats.decision(guard)
    assert 0 < result.decision.clip_factor < 1
    assert [update.updated for update in result.updates] == [True, False, True, True]
    assert [update.state and update.state.step for update in result.updates] == [1, None, 8, 2**40 + 1]
    assert result.updates[1].parameters is entries[1][0]
    # Each entry moves as it would alone with the common factor, which multiplies after unscaling.
    for entry, update in zip(entries, result.updates, strict=True):
        if not update.updated:
            continue
        clipped = entry[1].float() * 0.25 * result.decision.clip_factor
        alone = adamw_step(entry[0], clipped, entry[2], OPTIONS)
        for name, tensor in parts(alone).items():
            assert same_bits(parts(update)[name], tensor)


def test_without_clipping_each_entry_is_adamw_step() -> None:
    for guard in (GradientGuardOptions(max_norm=None), GradientGuardOptions(max_norm=1e6)):
        entries = group()
        result = guarded_adamw_step(entries, OPTIONS, guard=guard)
        assert result.decision.clip_factor == 1.0
        for entry, update in zip(entries, result.updates, strict=True):
            alone = adamw_step(*entry, OPTIONS)
            assert alone.updated == update.updated
            if alone.updated:
                assert all(same_bits(parts(update)[name], tensor) for name, tensor in parts(alone).items())


def test_max_norm_zero_leaves_decay_and_the_step() -> None:
    entries = group()
    result = guarded_adamw_step(entries, OPTIONS, guard=GradientGuardOptions(max_norm=0.0))
    assert result.decision.clip_factor == 0.0
    for (parameters, gradients, state), update in zip(entries, result.updates, strict=True):
        if update.updated:
            alone = adamw_step(parameters, torch.zeros_like(gradients), state, OPTIONS)
            assert alone.state.step == update.state.step
            assert same_bits(alone.parameters, update.parameters)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_skip_keeps_the_whole_group(value) -> None:
    entries = group()
    entries[3][1].fill_(value)
    kept = [entry[0].clone() for entry in entries]
    recorded = record(lambda: guarded_adamw_step(entries, OPTIONS))
    assert recorded.count("adamw_scaled") == 0
    assert max(recorded.allocations) < 1024, "rows, report and table only"
    result = recorded.result
    assert result.decision.skip_update
    assert result.stats.total_norm == math.inf
    for entry, before, update in zip(entries, kept, result.updates, strict=True):
        assert update.parameters is entry[0]
        assert update.state is entry[2]
        assert not update.updated
        assert same_bits(entry[0], before)


def test_an_overflow_in_unscaling_skips() -> None:
    result = guarded_adamw_step([(filled(1.0), filled(3e38), None)], OPTIONS, StepControl(gradient_scale=0.5))
    assert result.decision.skip_update
    assert not result.updates[0].updated


def test_the_error_policy_raises_before_any_update() -> None:
    entries = group()
    entries[0][1][0, 0] = np.inf
    kept = [
        tensor.clone() for entry in entries for tensor in (entry[0], *(entry[2].into_parts()[1:3] if entry[2] else ()))
    ]
    guard = GradientGuardOptions(nonfinite=NonFinitePolicy.ERROR)

    def call() -> None:
        with pytest.raises(NonFiniteGradients, match="NaN or infinity among 1037 elements of 4 tensors"):
            guarded_adamw_step(entries, OPTIONS, guard=guard)

    recorded = record(call)
    assert recorded.count("analyze_gradient") == 1
    assert recorded.count("adamw_scaled") == 0
    after = [tensor for entry in entries for tensor in (entry[0], *(entry[2].into_parts()[1:3] if entry[2] else ()))]
    assert all(map(same_bits, kept, after))


def test_skip_update_looks_at_nothing() -> None:
    entries = group()
    entries[0][1].fill_(np.nan)
    guard = GradientGuardOptions(nonfinite=NonFinitePolicy.ERROR)
    recorded = record(lambda: guarded_adamw_step(entries, OPTIONS, StepControl(skip_update=True), guard))
    assert recorded.allocations == []
    assert recorded.operators == []
    result = recorded.result
    assert result.stats is None
    assert result.decision.skip_update
    assert all(update.parameters is entry[0] for update, entry in zip(result.updates, entries, strict=True))


@pytest.mark.parametrize("entries", [[], [(torch.empty(0), torch.empty(0), None)]], ids=len)
def test_a_group_without_elements(entries) -> None:
    result = guarded_adamw_step(entries, OPTIONS)
    assert (result.stats.total_norm, result.stats.elements) == (0.0, 0)
    assert not result.decision.skip_update
    assert [update.updated for update in result.updates] == [False] * len(entries)


def test_entries_may_be_an_iterator() -> None:
    result = guarded_adamw_step(iter(group()), OPTIONS)
    assert len(result.updates) == 4


@pytest.mark.parametrize(
    ("entries", "changes", "error", "message"),
    [
        (filled(1.0), {}, InvalidTensor, r"entries must be a sequence of \(parameters, gradients, state\), got Tensor"),
        (None, {}, InvalidTensor, r"entries must be a sequence .* got NoneType"),
        ([filled(1.0)], {}, InvalidTensor, r"entries\[0\] must be a tuple \(parameters, gradients, state\)"),
        ([(filled(1.0), filled(1.0))], {}, InvalidTensor, r"entries\[0\] must be a tuple"),
        ([[filled(1.0), filled(1.0), None]], {}, InvalidTensor, r"entries\[0\] must be a tuple"),
        ([], {"guard": 1.0}, InvalidOption, r"guard must be GradientGuardOptions, got float"),
        ([], {"options": None}, InvalidOption, r"options must be AdamWOptions, got NoneType"),
        ([], {"control": 2.0}, InvalidOption, r"control must be StepControl, got float"),
    ],
)
def test_guarded_step_refuses(entries, changes, error, message) -> None:
    with pytest.raises(error, match=message):
        guarded_adamw_step(**{"entries": entries, "options": OPTIONS, **changes})


def test_adamw_step_runs_the_case_table_that_it_can_take() -> None:
    """Guards the filters above: no kind of case may silently drop out."""
    kinds = {(case.gradient_dtype, case.options.amsgrad, case.options.maximize) for case in FLAT_CASES}
    assert len(kinds) == 12
    assert len(GUARDED) >= 9
    assert all(isinstance(case, Case) for case in GUARDED)


@pytest.mark.parametrize(
    ("changes", "error", "message"), [row[1:] for row in BAD_TENSORS], ids=[r[0] for r in BAD_TENSORS]
)
def test_a_group_is_refused_before_its_statistics(changes, error, message) -> None:
    """The last of three entries is wrong and the first holds a NaN that would raise: the check comes first."""
    arguments = {**GOOD, **changes}
    options, control = arguments.pop("options"), arguments.pop("control")
    healthy = (filled(1.0), filled(np.nan), state_of(amsgrad=isinstance(options, AdamWOptions) and options.amsgrad))
    entries = [healthy, healthy, tuple(arguments.values())]
    kept = [tensor.clone() for tensor in (healthy[0], healthy[2].first_moment)]
    guard = GradientGuardOptions(nonfinite=NonFinitePolicy.ERROR)

    def call() -> None:
        with pytest.raises(error, match=message) as caught:
            guarded_adamw_step(entries, options, control, guard)
        if not isinstance(caught.value, InvalidOption | StepOverflow) and "CPU" not in message:
            assert "entries[2]" in str(caught.value)

    recorded = record(call)
    assert not any(name.startswith("ruda_optim::") for name in recorded.operators)
    assert recorded.allocations == []
    assert same_bits(kept[0], healthy[0])
    assert same_bits(kept[1], healthy[2].first_moment)
