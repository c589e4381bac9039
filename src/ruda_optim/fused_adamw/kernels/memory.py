"""Whose memory it is: tensors without memory of their own, and tensors that share what a step writes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidTensor

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    import torch
    from torch import Tensor


def overlaps(tensor: Tensor) -> bool:
    """True if two elements may share memory, as in an expanded tensor (sufficient; exact for views by slicing)."""
    if tensor.numel() == 0:
        return False  # whatever its strides say
    reach = 0  # the farthest offset that the dimensions seen so far can produce
    for stride, size in sorted((st, si) for si, st in zip(tensor.shape, tensor.stride(), strict=True) if si > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False


def has_memory(tensor: Tensor) -> bool:
    """False for a strided tensor whose elements lie nowhere: a wrapper subclass, a storage that was freed or cut short.

    A meta tensor passes: its device says what it is.
    """
    if tensor.numel() == 0 or tensor.device.type == "meta":
        return True
    try:
        storage = tensor.untyped_storage()
        end = tensor.storage_offset() * tensor.element_size() + reach(tensor)
        return storage.data_ptr() != 0 and end <= storage.nbytes()
    except (RuntimeError, NotImplementedError):  # a storage that may not be looked at
        return False


def check_has_memory(name: str, tensor: Tensor) -> None:
    """Raise :class:`InvalidTensor` for a tensor that :func:`has_memory` is false for."""
    if not has_memory(tensor):
        raise InvalidTensor(
            f"{name} must have memory of its own, got a {type(tensor).__name__} of shape {tuple(tensor.shape)} without "
            "any: a subclass that wraps other tensors, or a storage that was freed. Pass the plain tensors inside it, "
            "or allocate the storage again"
        )


def check_memory(written: Sequence[tuple[str, Tensor]], read: Sequence[tuple[str, Tensor]] = ()) -> None:
    """Raise :class:`InvalidTensor`, with both names, if a tensor that is written shares memory with any other.

    Args:
        written: (name, tensor) of everything that a step writes. No tensor overlaps itself; see :func:`overlaps`.
        read: the same of what it only reads. These may share memory with each other.

    Exact for all strides: views of one base pass if no byte belongs to two of them, such as two columns of a matrix.
    Costs a sort of the addresses; only tensors whose address ranges meet are looked at any closer.
    """
    named = [*written, *read]
    devices: dict[torch.device, list[tuple[int, int, int]]] = {}
    for index, (_, tensor) in enumerate(named):
        if tensor.numel() > 0:
            start = tensor.data_ptr()
            devices.setdefault(tensor.device, []).append((start, start + reach(tensor), index))
    for ranges in devices.values():
        for cluster in _clusters(ranges):
            for close in _clusters(_residues({index: named[index][1] for index in cluster})):
                _check_pairs(sorted(set(close)), named, len(written))


def _check_pairs(indices: list[int], named: list[tuple[str, Tensor]], written: int) -> None:
    for position, one in enumerate(indices):
        if one >= written:
            return
        for other in indices[position + 1 :]:
            if _share(named[one][1], named[other][1]):
                raise InvalidTensor(
                    f"{named[one][0]} shares memory with {named[other][0]}; every tensor that a step writes needs "
                    "memory of its own. To use one parameter in two places, tie the Parameter object "
                    "(b.weight = a.weight); otherwise give one of the two a copy (tensor.clone())"
                )


def reach(tensor: Tensor, period: int = 0) -> int:
    """Bytes from the first to the end of the last element; strides that are multiples of ``period`` count as none."""
    item = tensor.element_size()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return item + sum((n - 1) * step * item for n, step in steps if not period or step * item % period)


def _clusters(ranges: Iterable[tuple[int, int, int]]) -> Iterator[list[int]]:
    """The indices of ranges ``(start, end, index)`` in runs that hang together; a range that meets none is left out."""
    run: list[int] = []
    reached = 0
    for start, end, index in sorted(ranges):
        if start >= reached:
            if len(run) > 1:
                yield run
            run = []
        run.append(index)
        reached = max(reached, end)
    if len(run) > 1:
        yield run


def _residues(tensors: dict[int, Tensor]) -> Iterator[tuple[int, int, int]]:
    """The address ranges modulo the longest stride that all tensors have.

    Interleaved views, such as the columns of a matrix, are apart here, though their address ranges all meet.
    """
    strides = [
        {step * tensor.element_size() for n, step in zip(tensor.shape, tensor.stride(), strict=True) if n > 1}
        for tensor in tensors.values()
        if tensor.numel() > 1
    ]
    period = max(set.intersection(*strides), default=0) if strides else 0
    for index, tensor in tensors.items():
        start, size = tensor.data_ptr(), reach(tensor, period)
        if period:
            start %= period
            if start + size > period:  # around the end, and on from the beginning
                yield 0, start + size - period, index
        yield start, start + size, index


def _share(one: Tensor, other: Tensor) -> bool:
    """True if a byte belongs to both: NumPy solves it, without following the addresses."""
    return np.shares_memory(np.asarray(_Footprint(one)), np.asarray(_Footprint(other)))


class _Footprint:
    """Where a tensor's elements lie, in the form that NumPy makes an array of."""

    def __init__(self, tensor: Tensor) -> None:
        item = tensor.element_size()
        self.__array_interface__ = {
            "version": 3,
            "data": (tensor.data_ptr(), False),
            "typestr": f"|V{item}",
            "shape": tuple(tensor.shape),
            "strides": tuple(step * item for step in tensor.stride()),
        }
