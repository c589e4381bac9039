"""Moments in 16 bits on the CPU: the bits of the specification, and what a step with them can and cannot do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import product

import moment_runs
import numpy as np
import pytest
import torch
from cases import DTYPES
from kernel_runs import CPU
from moment_runs import FORMS, LAYOUTS, STORES, MomentKind, assert_same_bits, expected, tensors_of

from ruda_optim.fused_adamw import AdamWOptions, InvalidTensor, moment_codes
from ruda_optim.fused_adamw.storage import LaunchTable, TensorMemory, adamw_scaled, coefficient_table

LOW = FORMS[1:]
STRONG = {"learning_rate": 1e-2, "weight_decay": 0.1, "epsilon": 1e-8}


def step(memories: list[TensorMemory], options: AdamWOptions, completed: int, inverse_scale=1.0, clip=1.0) -> None:
    gradients = [memory.gradient for memory in memories]  # a table keeps none of them alive
    adamw_scaled(LaunchTable(memories, CPU), coefficient_table([options.prepare_step(completed)]), inverse_scale, clip)
    del gradients


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("gradient", DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_a_step_has_the_bits_of_the_specification(form, gradient, store, amsgrad) -> None:
    options = AdamWOptions(**STRONG, amsgrad=amsgrad, maximize=gradient == "bfloat16")
    kinds = [
        MomentKind(form, gradient, store, amsgrad, layout, first, shape, seed)
        for seed, (layout, first, shape) in enumerate(
            [*product(LAYOUTS, (False, True), [(61, 43)]), *(("contiguous", False, (n,)) for n in (1, 7, 1024, 1025))]
        )
    ]
    memories = [kind.memory() for kind in kinds]
    results = [tensors_of(memory) for memory in memories]
    step(memories, options, 6, 0.5, 0.375)
    for kind, found in zip(kinds, results, strict=True):
        assert_same_bits(found, expected(kind, options, 6, 0.5, 0.375), kind)


@pytest.fixture(scope="module")
def own_digest() -> dict[str, str]:
    digest = moment_runs.digest()
    assert len(set(digest.values())) == len(digest), "kinds that differ have one hash: the digest is blind"
    return digest


@pytest.mark.parametrize("level", ["4", "3", "2", "0"])
def test_every_level_and_thread_count_gives_the_same_bits(level, own_digest) -> None:
    environment = {**os.environ, "RUDA_CPU_LEVEL": level, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, moment_runs.__file__, "1", "2", "7"]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if f"got '{level}'" in result.stderr:
        pytest.skip(f"level {level} is not part of this build or not for this processor")
    assert result.returncode == 0, result.stderr
    assert [json.loads(line) for line in result.stdout.splitlines()] == [own_digest] * 3


@pytest.mark.parametrize("form", LOW)
def test_no_place_in_a_tensor_and_no_cut_changes_an_element(form) -> None:
    kind = MomentKind(form, "bfloat16", "split", shape=(150,))
    whole = kind.memory()
    wanted = tensors_of(whole)
    step([whole], AdamWOptions(**STRONG), 3)
    for cut in range(1, 150):
        memory = kind.memory()
        parts = [
            TensorMemory(**{n: getattr(memory, n)[part] for n in (*wanted, "gradient")})
            for part in (slice(cut), slice(cut, None))
        ]
        found = tensors_of(memory)
        step(parts, AdamWOptions(**STRONG), 3)
        assert_same_bits(found, wanted, f"cut at {cut}")


@pytest.mark.parametrize("form", LOW)
def test_the_step_number_changes_the_dither_and_nothing_else(form) -> None:
    found = []
    for completed in (1000, 1001, 1000):
        memory = MomentKind(form).memory()
        found.append(tensors_of(memory))
        # No bias left to correct: the same coefficients but for the seed.
        step([memory], AdamWOptions(beta1=0.5, beta2=0.5), completed)
    assert_same_bits(found[0], found[2])
    assert_same_bits({"parameter": found[0]["parameter"]}, {"parameter": found[1]["parameter"]})
    assert (found[0]["exp_avg"].view(torch.int16) != found[1]["exp_avg"].view(torch.int16)).float().mean() > 0.1


@pytest.mark.parametrize("form", LOW)
def test_the_mean_of_v_is_right_after_6000_steps(form) -> None:
    """Within 1 percent, where rounding to nearest is wrong by more than 20: tests/functional/test_moment_codes.py.

    Elements round independently: a spread of 30 percent among 32,768 is 0.17 percent of their mean.
    """
    count, beta2 = 2**15, 0.999
    random = torch.Generator().manual_seed(0)
    pool = torch.randn(2**18, generator=random)
    parameter = torch.randn(count, generator=random)
    word = torch.int16 if form == "packed16" else torch.bfloat16
    m = torch.zeros(count, dtype=word)
    v = None if form == "packed16" else torch.zeros(count, dtype=word)
    gradient = torch.empty(count)
    table = LaunchTable([TensorMemory(gradient, parameter, m, v)], CPU)
    options = AdamWOptions(learning_rate=0, weight_decay=0, beta2=beta2)
    exact = torch.zeros(count)
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # short parallel regions crawl where other processes keep the second core busy
    try:
        for completed, at in enumerate(torch.randint(0, 2**18 - count, (6000,), generator=random).tolist()):
            gradient.copy_(pool[at : at + count])
            exact.lerp_(gradient.square(), 1 - beta2)
            adamw_scaled(table, coefficient_table([options.prepare_step(completed)]))
    finally:
        torch.set_num_threads(before)
    stored = v.double() if v is not None else torch.from_numpy(moment_codes.decode_packed(m.numpy().view(np.uint16))[1])
    assert abs(float(stored.double().mean() / exact.double().mean()) - 1) < 0.01


@pytest.mark.parametrize("beta2", [0.999, 0.95])
def test_no_word_and_no_gradient_makes_a_step_explode(beta2) -> None:
    """From every word, with the gradient that moves it farthest; also with random ones.

    The bound is 13.9 lr: |m| <= 14.94 sqrt(v) for every word, then Cauchy and Schwarz. Many steps have been made, so
    nothing corrects a bias.
    """
    words = np.arange(2**16, dtype=np.uint16)
    m, v = (x.astype(np.float64) for x in moment_codes.decode_packed(words))
    with np.errstate(divide="ignore"):
        worst = 0.1 * beta2 * v / ((1 - beta2) * 0.9 * m)
    worst[~np.isfinite(worst)] = 1.0
    random = 10.0 ** np.random.default_rng(0).uniform(-30, 18, len(words))
    for gradient in (worst, -worst, random, np.zeros_like(worst)):
        parameter = torch.zeros(len(words))
        memory = TensorMemory(
            torch.from_numpy(gradient.astype(np.float32)), parameter, torch.from_numpy(words.view(np.int16).copy())
        )
        step([memory], AdamWOptions(1.0, 0.9, beta2, epsilon=1e-30, weight_decay=0.0), 10**6)
        assert float(parameter.abs().max()) <= 13.9
        assert parameter.isfinite().all()


def test_moments_of_one_launch_have_one_form() -> None:
    memories = [MomentKind(form, shape=(5,)).memory() for form in FORMS]
    with pytest.raises(InvalidTensor, match="tensor 0 has float32 moments and tensor 1 has bfloat16 ones"):
        LaunchTable(memories, CPU)
