"""The Triton kernel of a step's decision: ``decide`` of ``csrc/cuda.cu``, statement by statement."""

from __future__ import annotations

import triton
import triton.language as tl

from .memory import COEFFICIENTS, INFINITY, ROW_SIZE, STEP, seed_of_step
from .statistics import inverse_of, merge_rows


@triton.jit
def _decide_step(bad, scale, sumsq, measured, check_finite, found, max_norm, epsilon):
    """csrc/gradient_stats.h, decide_step: (skip, clip factor)."""
    finite = (measured == 0) | (bad == 0.0)
    skip = (found > 0.0) | ((check_finite != 0) & (finite == 0))
    norm = scale * tl.sqrt(sumsq)
    factor = max_norm / (norm + epsilon)
    factor = tl.where((norm == 0.0) | (factor > 1.0), 1.0, factor)
    factor = tl.where((max_norm == 0.0) | (finite == 0), 0.0, factor)
    clips = (measured != 0) & (max_norm >= 0.0) & (max_norm < INFINITY) & (skip == 0)
    return skip, tl.where(clips, factor, 1.0).to(tl.float32)


@triton.jit
def _power(base, exponent):
    """base^exponent in FP64 by repeated squaring; exponent: int64 >= 0."""
    result = tl.full(base.shape, 1.0, tl.float64)
    left = tl.max(exponent)
    while left > 0:
        result = tl.where((exponent & 1) != 0, result * base, result)
        base = base * base
        exponent = exponent >> 1
        left = left >> 1
    return result


_ARGUMENTS = ["fields", "hyperparameters", "report", "decision", "counts", "coefficients", "rows", "scale", "found_inf"]
_ARGUMENTS += ["n", "row_count", "has_scale", "has_found_inf", "measured", "check_finite", "inverse_scale"]


@triton.jit(do_not_specialize=_ARGUMENTS)
def decide_kernel(
    fields,
    hyperparameters,
    report,
    decision,
    counts,
    coefficients,
    rows,
    scale,
    found_inf,
    n,
    row_count,
    has_scale,
    has_found_inf,
    measured,
    check_finite,
    inverse_scale,
    MERGE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program, and the only one. ``Kernels.decide`` says what is read and written.

    row_count: below 0 if there are no rows. What is absent is any other memory, which is not read then.
    """
    found = tl.load(found_inf, mask=has_found_inf != 0, other=0.0)
    # What is said of gradients that nobody measured: not bad, and no number for the rest.
    stored = (row_count < 0) & (measured != 0)
    bad = tl.load(report, mask=stored, other=0.0)
    largest = tl.load(report + 1, mask=stored, other=float("nan"))
    sumsq = tl.load(report + 2, mask=stored, other=float("nan"))
    if row_count >= 0:
        merged_scale, merged_sumsq, merged_bad = merge_rows(rows, 0, row_count, MERGE)
        bad = merged_bad.to(tl.float64)
        largest = merged_scale.to(tl.float64)
        sumsq = merged_sumsq.to(tl.float64)
    max_norm = tl.load(hyperparameters + 6)
    epsilon = tl.load(hyperparameters + 7)
    skip, clip_factor = _decide_step(bad, largest, sumsq, measured, check_finite, found, max_norm, epsilon)
    skipped = tl.where(skip, 1, 0)
    in_all = tl.load(counts) + skipped
    in_a_row = (tl.load(counts + 1) + 1) * skipped
    inverse = inverse_of(scale, has_scale, inverse_scale)
    # A thread that reads the report after this sees the same numbers, or a bad one where found_inf calls the step off
    # anyway; of the counts and the steps, the thread that writes uses what it read itself.
    tl.store(report, tl.where((bad != 0.0) | (found > 0.0), 1.0, 0.0).to(tl.float64))
    tl.store(report + 1, largest)
    tl.store(report + 2, sumsq)
    tl.store(decision, skipped.to(tl.float32))
    tl.store(decision + 1, clip_factor)
    tl.store(decision + 2, inverse)
    tl.store(decision + 3, 0.0)
    tl.store(counts, in_all)
    tl.store(counts + 1, in_a_row)

    for at in range(0, n, BLOCK):
        i = at + tl.arange(0, BLOCK)
        mask = i < n
        counter = tl.load(fields + n * STEP + i, mask=mask, other=0).to(tl.pointer_type(tl.float32))
        h = hyperparameters + tl.load(fields + n * COEFFICIENTS + i, mask=mask, other=0) * 8
        completed = tl.load(counter, mask=mask, other=0.0)
        t = completed + 1.0
        lr = tl.load(h, mask=mask, other=0.0)
        beta1 = tl.load(h + 1, mask=mask, other=0.0)
        beta2 = tl.load(h + 2, mask=mask, other=0.0)
        c = coefficients + i * ROW_SIZE
        tl.store(c, lr.to(tl.float32), mask=mask)
        tl.store(c + 1, (lr * tl.load(h + 4, mask=mask, other=0.0)).to(tl.float32), mask=mask)
        tl.store(c + 2, (1.0 - beta1).to(tl.float32), mask=mask)
        tl.store(c + 3, (1.0 - beta2).to(tl.float32), mask=mask)
        tl.store(c + 4, (1.0 / (1.0 - _power(beta1, t.to(tl.int64)))).to(tl.float32), mask=mask)
        tl.store(c + 5, (1.0 / (1.0 - _power(beta2, t.to(tl.int64)))).to(tl.float32), mask=mask)
        tl.store(c + 6, tl.load(h + 3, mask=mask, other=0.0).to(tl.float32), mask=mask)
        tl.store(c + 7, tl.load(h + 5, mask=mask, other=0.0).to(tl.float32), mask=mask)
        seed_low, seed_high = seed_of_step(t.to(tl.int64))
        tl.store(c + 8, seed_low, mask=mask)
        tl.store(c + 9, seed_high, mask=mask)
        tl.store(counter, tl.where(skip, completed, t), mask=mask)
