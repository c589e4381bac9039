"""The codes of 16-bit moments: known words, every word, what one encoding may lose, and what a step can do with it."""

from __future__ import annotations

import numpy as np
import pytest

from ruda_optim.fused_adamw.moment_codes import (
    NEAREST,
    decode_bf16,
    decode_packed,
    dither,
    encode_bf16,
    encode_packed,
)
from ruda_optim.fused_adamw.options import seed_of_step

WORDS = np.arange(2**16, dtype=np.uint16)
BETAS = [(0.9, 0.999), (0.9, 0.95)]


def bits(x: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


@pytest.mark.parametrize(
    ("parameter", "gradient", "step", "wanted"),
    [(1, 0.5, 1, 0xD00D1B31), (0, 0, 1, 0x4FB7CA8B), (-0.1, 1e-3, 1000, 0x8C13651D), (3, -2, 7, 0xA702429E)],
)
def test_known_dithers(parameter, gradient, step, wanted) -> None:
    assert dither(parameter, gradient, seed_of_step(step)) == wanted


@pytest.mark.parametrize(
    ("m", "v", "r", "wanted"),
    [
        (0, 0, NEAREST, 0x0000),
        (0.1, 0.01, NEAREST, 0x4B56),
        (-0.1, 0.01, 0, 0xCB56),
        (-0.1, 0.01, 0xFFFFFFFF, 0xCD57),
        (1e-9, 1e-12, 0x12345678, 0x00D1),
        (0.5, 1e-30, NEAREST, 0x7E00),
        (1e3, 1e9, NEAREST, 0x11E8),
        (1, np.inf, 0, 0x01FF),
    ],
)
def test_known_words(m, v, r, wanted) -> None:
    assert encode_packed(m, v, r) == wanted


def test_known_moments() -> None:
    m, v = decode_packed([0x4B56, 0xCD57, 0x7E00])
    np.testing.assert_array_equal(m, np.float32([0.09765625, -0.10546875, 1.06137321e-13]))
    np.testing.assert_array_equal(v, np.float32([0.009765625, 0.01171875, 1.76704843e-28]))


@pytest.mark.parametrize("r", [0, NEAREST, 0xFFFFFFFF])
def test_what_is_not_finite_saturates_and_no_sign_of_a_nan_counts(r) -> None:
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0xFFFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert (encode_packed(nan, nan, r) == 0x7FFF).all()
    assert (encode_packed([np.inf, -np.inf], [np.inf, np.inf], r) == [0x7FFF, 0xFFFF]).all()
    assert (encode_packed(0, [-1.0, -0.0, -np.inf], r) & 511 == 0).all(), "a negative v, which no step makes"
    for words in encode_bf16(nan, nan, r):
        assert (words == 0x7FC0).all()
    for words in encode_bf16([np.inf, -np.inf], [np.inf, -np.inf], r):
        assert (words == [0x7F80, 0xFF80]).all()


def test_every_word_survives_fp32_and_bf16() -> None:
    m, v = decode_packed(WORDS)
    assert not (bits(m) & 0xFFFF).any()
    assert not (bits(v) & 0xFFFF).any()
    np.testing.assert_array_equal(encode_packed(m, v), WORDS)
    # Exported as zeros, and packed again.
    assert encode_packed(np.float32(0), np.float32(0)) == 0
    # Every BF16 number is one of its own codes, whatever the dither: there is nothing to round.
    numbers = decode_bf16(WORDS)
    finite = ~np.isnan(numbers)
    for r in (0, 0xFFFFFFFF):
        for words in encode_bf16(numbers, numbers, r):
            np.testing.assert_array_equal(words[finite], WORDS[finite])


def test_a_step_from_any_word_is_bounded() -> None:
    """|m| <= U sqrt(v) for every word, and so, by Cauchy and Schwarz, |m'| <= B sqrt(v') for every gradient."""
    m, v = (x.astype(np.float64) for x in decode_packed(WORDS))
    ratio = np.abs(m) / np.sqrt(v)
    limit = 14.94
    assert limit - 0.01 < ratio.max() <= limit
    assert ratio.reshape(2, 64, 512)[0, 63].min() >= 7.98, "every v must admit what FP32 reaches, 7.27"
    for beta1, beta2 in BETAS:
        bound = np.sqrt(beta1**2 * limit**2 / beta2 + (1 - beta1) ** 2 / (1 - beta2))
        assert bound < 13.9
        with np.errstate(divide="ignore", over="ignore"):
            worst = (1 - beta1) * beta2 * v / ((1 - beta2) * beta1 * m)  # the gradient with the largest quotient
        worst[~np.isfinite(worst)] = 1e30
        for gradient in (worst, 2 * worst, worst / 2, np.zeros_like(worst), np.full_like(worst, 1e18)):
            new_m = beta1 * m + (1 - beta1) * gradient
            new_v = beta2 * v + (1 - beta2) * gradient**2
            assert (np.abs(new_m) / np.sqrt(new_v)).max() <= bound


def moments(count: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Second moments over 24 decades, first moments from tiny beside their root to 7 times as large."""
    random = np.random.default_rng(seed)
    v = (10.0 ** random.uniform(-20, 4, count)).astype(np.float32)
    m = random.choice([-1, 1], count) * 10.0 ** random.uniform(-3, 0.84, count) * np.sqrt(v)
    return m.astype(np.float32), v


def test_one_encoding_errs_by_a_known_part() -> None:
    m, v = moments(200_000)
    random = np.random.default_rng(1)
    for r in (np.uint32(NEAREST), random.integers(0, 2**32, len(m), dtype=np.uint32)):
        got_m, got_v = (x.astype(np.float64) for x in decode_packed(encode_packed(m, v, r)))
        share = 4 if np.ndim(r) else 8  # to nearest: half a code
        assert (np.abs(got_v - v) <= v / share).all()
        scale = 2.0 ** np.floor(np.log2(got_v) / 2)
        # The spacing of the codes of |m| is an eighth of |m| + scale / 16, in the octave that the result lies in.
        assert (np.abs(got_m - m) <= (np.maximum(np.abs(m), np.abs(got_m)) + scale / 16) / (2 * share)).all()


def test_rounding_with_all_dithers_is_unbiased() -> None:
    """The mean over every dither: exact but for the 16 bits of the dither."""
    every = np.arange(2**16, dtype=np.uint32)
    halves = every | np.random.default_rng(0).permutation(2**16).astype(np.uint32) << 16
    for m, v in zip(*moments(200, seed=2), strict=True):
        got_m, got_v = (x.mean(dtype=np.float64) for x in decode_packed(encode_packed(m, v, halves)))
        scale = float(np.sqrt(v))
        assert abs(got_v / v - 1) < 2e-5
        # The codes of m depend on that of v, so their mean is one over 2^16 random pairs, within a spacing of at most
        # |m| / 8 + scale / 128; five standard deviations.
        assert abs(got_m - m) < 5 * (abs(m) / 8 + scale / 128) / 2 / 2**8 + 2e-5 * scale
        for words, x in zip(encode_bf16(m, v, halves), (m, v), strict=True):
            assert abs(decode_bf16(words).mean(dtype=np.float64) / x - 1) < 2.0**-16


@pytest.mark.parametrize("form", ["bfloat16", "packed16"])
def test_nearest_rounding_would_stop_a_slow_average(form) -> None:
    """The dithered mean of v after 6,000 steps is right within 1 percent; to nearest it is wrong by far more.

    Elements round independently: a spread of 30 percent among 8,192 is 0.33 percent of their mean.
    """
    count, steps, beta2 = 8192, 6000, np.float32(0.999)
    random = np.random.default_rng(3)
    pool = random.standard_normal(1 << 18, np.float32)
    parameter = random.standard_normal(count, np.float32)
    few = slice(256)
    exact, dithered, nearest = np.zeros(count), np.zeros(count, np.float32), np.zeros(256, np.float32)

    def stored(v, r):
        if form == "bfloat16":
            return decode_bf16(encode_bf16(v, v, r)[1])
        return decode_packed(encode_packed(np.zeros_like(v), v, r))[1]

    for step in range(1, steps + 1):
        gradient = pool[(at := random.integers(0, (1 << 18) - count)) : at + count]
        square = np.square(gradient)
        exact = beta2 * exact + (1 - beta2) * square
        dithered = stored(dithered + (1 - beta2) * (square - dithered), dither(parameter, gradient, seed_of_step(step)))
        nearest = stored(nearest + (1 - beta2) * (square[few] - nearest), np.uint32(NEAREST))
    assert abs(dithered.mean(dtype=np.float64) / exact.mean() - 1) < 0.01
    assert abs(nearest.mean(dtype=np.float64) / exact[few].mean() - 1) > 0.2


def test_the_dither_looks_random() -> None:
    """Each byte is uniform; its halves, |g|, and the dither of the step before tell nothing about it."""
    count = 2**20
    random = np.random.default_rng(5)
    parameter = (0.02 * random.standard_normal(count)).astype(np.float32)
    gradient = (1e-3 * random.standard_normal(count)).astype(np.float32)
    found = dither(parameter, gradient, seed_of_step(1000))
    following = dither(parameter, gradient, seed_of_step(1001))
    for shift in (0, 8, 16, 24):
        counts = np.bincount(found >> np.uint32(shift) & np.uint32(255), minlength=256)
        # Chi squared over 255 degrees of freedom: 1 with a standard deviation of 0.09; three of them.
        assert 0.73 < np.square(counts - count / 256).sum() / (count / 256) / 255 < 1.27

    def independent(left, right) -> None:
        # A standard deviation of the correlation is 0.001.
        assert abs(np.corrcoef(left, right)[0, 1]) < 0.01

    low, high = found & np.uint32(0xFFFF), found >> np.uint32(16)
    independent(low, high)
    for half, next_half in ((low, following & np.uint32(0xFFFF)), (high, following >> np.uint32(16))):
        independent(half, next_half)
        independent(half, np.abs(gradient))
        independent(half, np.abs(parameter))
        independent(half[1:], half[:-1])

    # An element that no sample touches, over the steps.
    still = np.concatenate(
        [dither(np.float32([0.02]), np.float32([0]), seed_of_step(step)) for step in range(1, 20_001)]
    )
    for half in (still & np.uint32(0xFFFF), still >> np.uint32(16)):
        # Standard deviations: 0.002 of the range, and 0.007 for the correlation; five of them.
        assert abs(half.mean() / 2**16 - 0.5) < 0.01
        assert abs(np.corrcoef(half[1:], half[:-1])[0, 1]) < 0.035


def test_no_payload_of_a_nan_changes_a_dither() -> None:
    nan = np.array([0x7FC00000, 0xFFC00000, 0x7FFFFFFF, 0x7F800001], np.uint32).view(np.float32)
    assert len(set(dither(nan, np.float32(0.5), 7).tolist())) == 1
