"""Whose memory it is: check_memory against every byte counted, and tensors without memory of their own."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch
from no_memory import KINDS, without_memory

from ruda_optim.fused_adamw import InvalidTensor
from ruda_optim.fused_adamw.storage import LaunchTable, TensorMemory, check_has_memory, check_memory, overlaps


def named(*tensors: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    return [(f"tensor {index}", tensor) for index, tensor in enumerate(tensors)]


def bytes_of(tensor: torch.Tensor) -> set[int]:
    item = tensor.element_size()
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        offsets = (offsets[:, None] + np.arange(size) * stride * item).ravel()
    return {int(tensor.data_ptr() + offset + byte) for offset in offsets for byte in range(item)}


def test_any_two_views_are_judged_by_their_bytes() -> None:
    """Random views of one base, of several dtypes: exact in both directions."""
    random = np.random.default_rng(1)
    base = torch.zeros(512)
    seen = {True: 0, False: 0}
    for _ in range(1500):
        views = []
        while len(views) < 2:
            dtype = (torch.float32, torch.bfloat16)[random.integers(2)]
            sizes = random.integers(1, 5, random.integers(0, 4)).tolist()
            strides = random.integers(1, 20, len(sizes)).tolist()
            view = base.view(dtype).as_strided(sizes, strides, int(random.integers(0, 40)))
            if not overlaps(view):
                views.append(view)
        share = bool(bytes_of(views[0]) & bytes_of(views[1]))
        seen[share] += 1
        for written, read in ((named(*views), []), (named(views[0]), [("gradient", views[1])])):
            if share:
                with pytest.raises(InvalidTensor, match=r"tensor 0 shares memory with (tensor 1|gradient);"):
                    check_memory(written, read)
            else:
                check_memory(written, read)
        check_memory([], named(*views))
    assert min(seen.values()) > 150


@pytest.mark.parametrize(
    "views",
    [
        lambda m: [m[:, 0], m[:, 1]],
        lambda m: [m[:, :3], m[:, 3:]],
        lambda m: [m[::2], m[1::2]],
        lambda m: [m.t()[::2], m.t()[1::2]],
        lambda m: [m[:, ::2].t(), m[1::2, 1::2], m[::2, 1::2]],
        lambda m: [m[0], m[1], m[2:]],
        lambda m: [m[:4, :4], m[4:, :4].t(), m[:, 4:]],
        lambda m: [*m.flatten()[:9]],
        lambda m: [m[:0], m, m[3:3]],
    ],
)
def test_disjoint_views_of_one_base_pass(views) -> None:
    check_memory(named(*views(torch.zeros(8, 8))))


def test_the_pair_that_shares_is_named_among_many() -> None:
    matrix = torch.zeros(50, 40)
    columns = [matrix[:, i] for i in range(40)]
    with pytest.raises(InvalidTensor, match=r"tensor 17 shares memory with one row; .*tie the Parameter"):
        check_memory(named(*columns[:18]), [("one row", matrix[3, 17:])])
    array = np.zeros(8, dtype=np.float32)  # two storages over one memory
    with pytest.raises(InvalidTensor, match=r"tensor 0 shares memory with tensor 1;"):
        check_memory(named(torch.from_numpy(array), torch.from_numpy(array[7:])))


@pytest.mark.parametrize("interleaved", [False, True])
def test_thousands_of_views_of_one_base_cost_a_sort(interleaved) -> None:
    """Comparing every two of 8,000 columns would take half a minute and more."""
    base = torch.zeros(4, 8000) if interleaved else torch.zeros(8000, 4)
    views = base.unbind(1 if interleaved else 0)
    start = time.perf_counter()
    check_memory(named(*views))
    assert time.perf_counter() - start < 5.0


@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_without_memory_gets_no_address(kind) -> None:
    nowhere = without_memory(kind, torch.ones(64))
    with pytest.raises(InvalidTensor, match=r"w must have memory of its own, got a .* of shape"):
        check_has_memory("w", nowhere)
    with pytest.raises(InvalidTensor, match="column 1 must have memory of its own"):
        LaunchTable([TensorMemory(torch.ones(64)), TensorMemory(nowhere)], torch.device("cpu"))
    for role in ("parameter", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy", "remainder", "parameter_out", "step"):
        with pytest.raises(InvalidTensor, match="memory of its own"):
            LaunchTable([TensorMemory(torch.ones(64), **{role: nowhere.detach()})], torch.device("cpu"))
    check_has_memory("empty", nowhere[:0] if kind.startswith("freed") else torch.empty(0))
    check_has_memory("a subclass with memory", torch.nn.Buffer(torch.ones(3)))
