"""What a step does on the host beside its launches: look at the tensors, count steps, fill in coefficients.

The C++ functions behind it are called through ctypes. For models of many small tensors the dispatcher would take longer
to reach them than they take, and a list of tensors that goes through it longer than the update.
"""

from __future__ import annotations

import ctypes
import functools
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShapeMismatch
from . import library

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from ..options import StepCoefficients
    from .tables import LaunchTable

_DLPACK_MAJOR = 1
_RECORD_NUMBERS = 9
"""int64 numbers of ``Record`` in the C++ file; sizes and strides come on top."""
_PARAMETER_STORAGE = 6
"""Where a record notes the address of torch's storage object, which is only ever prefetched."""


class _Reader(ctypes.Structure):
    """How the C++ functions read tensors: torch's DLPack exchange table, ``"grad"``, ``Tensor.is_neg``."""

    _fields_ = (("exchange", ctypes.c_void_p), ("grad", ctypes.py_object), ("is_neg", ctypes.py_object))


class _Functions:
    """The exported functions. They hold the interpreter lock, and raise what they set; one instance serves all."""

    def __init__(self) -> None:
        library.operators()  # says what to do if the library was not built
        address = ctypes.pythonapi.PyCapsule_GetPointer
        address.restype, address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        exchange = address(torch.Tensor.__dlpack_c_exchange_api__, b"dlpack_exchange_api")  # type: ignore[attr-defined]
        major = ctypes.c_uint32.from_address(exchange).value
        if major != _DLPACK_MAJOR:
            raise ImportError(
                f"ruda-optim reads tensors by DLPack {_DLPACK_MAJOR}, but torch {torch.__version__} speaks DLPack "
                f"{major}; install an earlier torch or a later ruda-optim"
            )
        self._reader = _Reader(exchange, "grad", torch._C.TensorBase.is_neg)
        reader = ctypes.byref(self._reader)
        lists, memory, number = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64
        opened = ctypes.PyDLL(library.path())

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(opened, name)
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        def reading(name: str, *arguments: Any) -> Callable[..., int]:
            return functools.partial(function(name, number, ctypes.c_void_p, *arguments), reader)

        self.same_objects = function("ruda_same_objects", ctypes.c_bool, lists, number, lists)
        self.same_values = function("ruda_same_values", ctypes.c_bool, lists, lists)
        self.count_gradients = reading("ruda_count_gradients", lists)
        self.record_tensors = reading("ruda_record_tensors", lists, memory)
        self.assign_coefficients = function("ruda_assign_coefficients", number, memory, number, memory, memory)
        self.unwatch = function("ruda_unwatch", None, number)
        self.advance_steps = function("ruda_advance_steps", None, memory, number)
        self.bind_gradients = reading(
            "ruda_bind_gradients", memory, memory, number, number, lists, lists, lists, number
        )


_functions = functools.cache(_Functions)


def as_list(items: Sequence[Any]) -> list[Any]:
    """The C++ functions read lists, nothing else."""
    return items if isinstance(items, list) else list(items)


def same_objects(everything: list[Any], first: int, part: Sequence[Any]) -> bool:
    """True if ``everything[first:]`` begins with the very objects of ``part``; ``==`` would compare values."""
    return bool(_functions().same_objects(everything, first, as_list(part)))


def same_values(dicts: list[dict[Any, Any]], values: list[Any]) -> bool:
    """True if ``values`` are the very objects that the dicts hold as values, one dict after the other."""
    return bool(_functions().same_values(dicts, values))


def count_gradients(tensors: Sequence[Tensor]) -> int:
    """How many tensors have a ``.grad``."""
    return _functions().count_gradients(as_list(tensors))


def torch_objects(tensors: Sequence[Tensor]) -> Tensor:
    """Where torch's own objects behind the tensors lie: int64 ``(n, 2)``, tensor and storage. Only ever prefetched."""
    addresses = [(tensor._cdata, tensor.untyped_storage()._cdata) for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.int64, device="cpu").view(-1, 2)


def watch_tensors(tensors: Sequence[Tensor]) -> int:
    """Hold tensors and remember their memory; the number to name them by, 0 for none."""
    return int(library.operators().watch_tensors.default(tensors, torch_objects(tensors))) if tensors else 0


def unwatch(number: int) -> None:
    """Let the tensors of :func:`watch_tensors` go."""
    _functions().unwatch(number)


def record_tensors(tensors: list[Tensor]) -> Tensor:
    """What strided tensors look like now (memory, dtype, device, sizes, strides), as a flat int64 tensor."""
    size = sum(_RECORD_NUMBERS + 2 * tensor.dim() for tensor in tensors)
    records = torch.zeros(size, dtype=torch.int64, device="cpu")
    done = _functions().record_tensors(tensors, records.data_ptr())
    if done != len(tensors):
        raise RuntimeError(f"tensor {done} of {len(tensors)} has no strided memory that can be watched")
    by_tensor = records[: _RECORD_NUMBERS * len(tensors)].view(-1, _RECORD_NUMBERS)
    by_tensor[:, _PARAMETER_STORAGE] = torch_objects(tensors)[:, 1]
    return records


def bind_gradients(
    table: LaunchTable,
    records: Tensor,
    watch: int,
    parameters: list[Tensor],
    gradients: list[Tensor] | None,
    held: list[Any],
    start: int,
) -> int:
    """See :func:`ruda_optim.fused_adamw.storage.bind_gradients`; the lists have one entry per table column."""
    return _functions().bind_gradients(
        table.address, records.data_ptr(), len(table), watch, parameters, gradients, held, start
    )


COEFFICIENTS = 8
"""FP32 numbers per row of the coefficient table."""


class CoefficientRows:
    """The coefficient table of a launch table, in memory that serves every step.

    Args:
        table: every column has a ``Field.STEP`` counter on the host.
        groups: int64 ``(n,)``, the group of each column.
    """

    def __init__(self, table: LaunchTable, groups: Tensor) -> None:
        if groups.shape != (len(table),) or groups.dtype is not torch.int64 or not groups.is_contiguous():
            raise ShapeMismatch(
                f"groups must be a contiguous int64 tensor with one entry per column, shape ({len(table)},), "
                f"got {groups.dtype} of shape {tuple(groups.shape)}"
            )
        self._table, self._groups = table, groups
        self._pairs = (ctypes.c_int64 * (2 * len(table)))()
        self._rows = torch.empty((0, COEFFICIENTS), dtype=torch.float32, device="cpu")
        self._numbers: Any = (ctypes.c_float * 0)()

    def assign(self) -> list[tuple[int, int]]:
        """Give every tensor its row: tensors with the same group and step counter share one.

        Returns:
            (group, completed steps) of each row.
        """
        table, pairs = self._table, self._pairs
        count = _functions().assign_coefficients(table.address, len(table), self._groups.data_ptr(), pairs)
        return [(pairs[2 * row], pairs[2 * row + 1]) for row in range(count)]

    def fill(self, steps: list[StepCoefficients]) -> Tensor:
        """One row per entry of ``steps``: the FP32 ``(len(steps), 8)`` host tensor that the kernels read.

        It is overwritten by the next call.
        """
        if len(steps) != len(self._rows):
            self._rows = torch.empty((len(steps), COEFFICIENTS), dtype=torch.float32, device="cpu")
            self._numbers = (ctypes.c_float * self._rows.numel()).from_address(self._rows.data_ptr())
        self._numbers[:] = [number for step in steps for number in step[:COEFFICIENTS]]
        return self._rows


def advance_steps(table: LaunchTable) -> None:
    """Count the update that was just launched in every ``Field.STEP`` counter; the moments now hold values."""
    _functions().advance_steps(table.address, len(table))
