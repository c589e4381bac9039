"""The launch description that every backend reads: one column per tensor, one row per :class:`Field`.

``LaunchTable.fields`` is an int64 CPU tensor of shape ``(len(Field), n)``. Pointers are stored as integers; a row of
pointers is contiguous, so a device backend can upload only the row that changed. ``layouts`` is a flat int64 CPU tensor
that describes the tensors which cannot be walked as flat memory (see :func:`describe_layout`).

The coefficient table is FP32 of shape ``(k, COEFFICIENTS)`` with the columns of ``csrc/adamw_update.h``'s
``Coefficients``; the row ``Field.COEFFICIENTS`` says which of the ``k`` rows a tensor uses.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import IntEnum, IntFlag
from typing import TYPE_CHECKING, NamedTuple

import torch

from ..errors import InvalidTensor
from .memory import check_has_memory

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor


class Field(IntEnum):
    """Rows of :attr:`LaunchTable.fields`. ``csrc/cpu_loops.h`` repeats the numbers; a test compares the two."""

    PARAM = 0  # FP32 values read: the parameter or its master; 0 with SPLIT
    PARAM_OUT = 1  # FP32 values written; equal to PARAM for an in-place step
    GRAD = 2  # never written
    EXP_AVG = 3  # or the packed words
    EXP_AVG_OUT = 4
    EXP_AVG_SQ = 5
    EXP_AVG_SQ_OUT = 6
    MAX_EXP_AVG_SQ = 7  # 0 without AMSGRAD
    MAX_EXP_AVG_SQ_OUT = 8
    COPY = 9  # half parameter beside the master, read and written; 0 if there is none
    REMAINDER = 10  # int16 low halves of a split master, read and written; 0 without SPLIT
    NUMEL = 11
    FLAGS = 12  # Flag bits
    COEFFICIENTS = 13  # row of the coefficient table
    LAYOUT = 14  # offset into LaunchTable.layouts; -1 for flat memory
    STEP = 15  # FP32 counter of completed steps on the tensor's device, or 0; decide reads and counts it


class Flag(IntFlag):
    """Bits of ``Field.FLAGS``."""

    GRAD_FP16 = 1  # neither GRAD bit: FP32
    GRAD_BF16 = 2
    COPY_FP16 = 4  # neither COPY bit: no half copy
    COPY_BF16 = 8
    AMSGRAD = 16
    FIRST = 32  # moments count as zero and their memory is not read
    SPLIT = 64  # the FP32 value is COPY (BF16) and REMAINDER together
    STRIDED = 128  # walk the tensors by LAYOUT
    ALIGNED = 256  # flat, and every pointer is a multiple of 16 bytes
    MOMENTS_BF16 = 512  # neither MOMENTS bit: FP32
    MOMENTS_PACKED = 1024  # EXP_AVG holds words of both moments; EXP_AVG_SQ is 0


MOMENTS_KIND = Flag.MOMENTS_BF16 | Flag.MOMENTS_PACKED
_FORMS = {0: "float32", int(Flag.MOMENTS_BF16): "bfloat16", int(Flag.MOMENTS_PACKED): "packed"}

COEFFICIENTS = 10
"""FP32 numbers per row of the coefficient table."""

# Roles in the order in which describe_layout lists their strides; in and out pointers of a role share a layout.
LAYOUT_ROLES = ("parameter", "gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "copy", "remainder")

_GRAD_FLAG = {torch.float32: Flag(0), torch.float16: Flag.GRAD_FP16, torch.bfloat16: Flag.GRAD_BF16}
_COPY_FLAG = {torch.float16: Flag.COPY_FP16, torch.bfloat16: Flag.COPY_BF16}
GRADIENT_DTYPES = tuple(_GRAD_FLAG)


@dataclass
class TensorMemory:
    """The memory of one tensor's update. Everything has the gradient's shape and device.

    ``parameter`` is FP32 (the parameter itself, or its master) and ``None`` for a split master, whose value is ``copy``
    (BF16) and ``remainder`` (16 bits) together. Moments are FP32, all of them, or BF16, all of them. Packed moments are
    16-bit words in ``exp_avg`` (BF16 or int16, their bits), without ``exp_avg_sq`` and with a BF16 ``max_exp_avg_sq``:
    ``moment_codes.py`` says how they are read. ``copy`` is the FP16 or BF16 parameter beside
    the master: it holds the master, rounded to nearest even, or what shall take the master's place, element by element;
    the kernel writes it anew. An output that is ``None`` means in place. ``first`` says that the moments' memory holds
    nothing yet. ``step`` is the FP32 host counter that ``advance_steps`` increments. Statistics need only the gradient.
    """

    gradient: Tensor
    parameter: Tensor | None = None
    exp_avg: Tensor | None = None
    exp_avg_sq: Tensor | None = None
    max_exp_avg_sq: Tensor | None = None
    copy: Tensor | None = None
    remainder: Tensor | None = None
    step: Tensor | None = None
    parameter_out: Tensor | None = None
    exp_avg_out: Tensor | None = None
    exp_avg_sq_out: Tensor | None = None
    max_exp_avg_sq_out: Tensor | None = None
    first: bool = False

    def without_gradient(self) -> list[Tensor]:
        """Every tensor but the gradient."""
        values = (getattr(self, entry.name) for entry in fields(self) if entry.name != "gradient")
        return [value for value in values if isinstance(value, torch.Tensor)]

    def roles(self) -> tuple[Tensor | None, ...]:
        """The tensors in the order of ``LAYOUT_ROLES``."""
        return (
            self.parameter,
            self.gradient,
            self.exp_avg,
            self.exp_avg_sq,
            self.max_exp_avg_sq,
            self.copy,
            self.remainder,
        )


class _Layout(NamedTuple):
    """How a tensor lies in memory, without the tensor: a table must not keep tensors alive between steps."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    contiguous: bool

    @classmethod
    def of(cls, tensor: Tensor | None) -> _Layout | None:
        return None if tensor is None else cls(tuple(tensor.shape), tensor.stride(), tensor.is_contiguous())


def describe_layout(roles: Sequence[_Layout | None]) -> list[int] | None:
    """How to walk tensors of one shape whose memory may be laid out differently.

    Returns ``None`` if all of them are dense with the same strides, so that one flat index serves them all. Otherwise a
    record ``[dimensions, sizes..., strides of role 0..., strides of role 1..., ...]``, outermost dimension first, with
    neighbouring dimensions merged where every tensor allows it, and zero strides for a role that is absent.
    """
    present = [layout for layout in roles if layout is not None]
    lead = present[0]
    if all(layout.contiguous for layout in present):
        return None
    dims = [d for d, size in enumerate(lead.shape) if size != 1]
    strides = [tuple(layout.strides[d] for layout in present) for d in dims]
    # Outermost first in the memory of the tensor that leads, so that the innermost loop runs along its memory.
    order = sorted(range(len(dims)), key=lambda k: strides[k][0], reverse=True)
    sizes: list[int] = []
    merged: list[tuple[int, ...]] = []
    for k in order:
        size, step = lead.shape[dims[k]], strides[k]
        if merged and all(outer == inner * size for outer, inner in zip(merged[-1], step, strict=True)):
            sizes[-1] *= size
            merged[-1] = step
        else:
            sizes.append(size)
            merged.append(step)
    if len(sizes) <= 1 and all(step == 1 for step in (merged[0] if merged else ())):
        return None
    record = [len(sizes), *sizes]
    columns = iter(range(len(present)))
    for layout in roles:
        column = None if layout is None else next(columns)
        record += [0 if column is None else step[column] for step in merged]
    return record


class LaunchTable:
    """One launch over many tensors of one device. It keeps no gradient alive.

    Args:
        memories: one entry per tensor, none of them empty; checked by the caller. A tensor without memory is refused.
        device: the device of all of them.
        hold: keep the tensors other than gradients alive, as long as the table lives.

    Raises:
        InvalidTensor: the moments are not all of one form.

    Attributes:
        fields: int64 CPU tensor of shape ``(len(Field), n)``; always the same memory.
        layouts: flat int64 CPU tensor of layout records.
        revision: counts the changes of anything but the gradient pointers and ``Field.COEFFICIENTS``, so that a backend
            knows when its device copy is out of date.
        moments: the ``MOMENTS`` bits of every tensor's flags.
        device_cache: scratch for the backend that launches this table; owned by it alone.
    """

    def __init__(self, memories: Sequence[TensorMemory], device: torch.device, *, hold: bool = True) -> None:
        self.device = device
        self._held = [memory.without_gradient() for memory in memories] if hold else []
        self.revision = 0
        self.device_cache: dict[str, object] = {}
        self._layouts = [[_Layout.of(tensor) for tensor in memory.roles()] for memory in memories]
        self._records = [describe_layout(layouts) for layouts in self._layouts]
        columns = [_column(i, *of) for i, of in enumerate(zip(memories, self._records, strict=True))]
        self.fields = torch.zeros((len(Field), len(columns)), dtype=torch.int64, device="cpu")
        if columns:
            self.fields.copy_(torch.tensor(columns, dtype=torch.int64, device="cpu").T)
        self._pack_layouts()
        self.numel = int(self.fields[Field.NUMEL].sum())
        self.moments = self._form_of_moments()
        self._statistics_rows: dict[int, int] = {}

    def __len__(self) -> int:
        return self.fields.shape[1]

    def select(self, columns: Sequence[int], device: torch.device) -> LaunchTable:
        """A table of some of the columns, all on ``device``, as they are now."""
        chosen = LaunchTable((), device)
        chosen._held = self._held
        chosen.fields = self.fields[:, list(columns)].contiguous()
        chosen.layouts = self.layouts
        chosen.numel = int(chosen.fields[Field.NUMEL].sum())
        chosen.moments = self.moments
        return chosen

    def describes(self, index: int, gradient: Tensor) -> bool:
        """Whether column ``index`` has a gradient of this dtype and layout already."""
        known = Flag(int(self.fields[Field.FLAGS, index])) & (Flag.GRAD_FP16 | Flag.GRAD_BF16)
        layout = self._layouts[index][LAYOUT_ROLES.index("gradient")]
        return known == _GRAD_FLAG[gradient.dtype] and layout == _Layout.of(gradient)

    def set_gradient(self, index: int, gradient: Tensor) -> None:
        """Describe a gradient (checked) whose dtype or layout differs from what column ``index`` says."""
        layouts = self._layouts[index]
        layouts[LAYOUT_ROLES.index("gradient")] = _Layout.of(gradient)
        record, old_record = describe_layout(layouts), self._records[index]
        column = self.fields[:, index].tolist()
        column[Field.GRAD] = gradient.data_ptr()
        old_flags = column[Field.FLAGS]
        column[Field.FLAGS] = int(
            Flag(old_flags) & ~(Flag.GRAD_FP16 | Flag.GRAD_BF16 | Flag.STRIDED | Flag.ALIGNED)
            | _GRAD_FLAG[gradient.dtype]
            | _layout_flag(column, record)
        )
        self.fields[:, index] = torch.tensor(column, dtype=torch.int64, device="cpu")
        if record != old_record:
            self._records[index] = record
            self.fields[Field.LAYOUT, index] = -1
            self._pack_layouts()
        if column[Field.FLAGS] != old_flags or record != old_record:
            self.revision += 1

    def statistics_rows(self, chunk: int) -> int:
        """Statistics rows of one pass: one per ``chunk`` elements of each tensor."""
        if chunk not in self._statistics_rows:
            self._statistics_rows[chunk] = int(self.rows_per_tensor(chunk).sum())
        return self._statistics_rows[chunk]

    def rows_per_tensor(self, chunk: int) -> Tensor:
        """int64 ``(n,)``: how many of those rows are each tensor's."""
        return (self.fields[Field.NUMEL] + (chunk - 1)) // chunk

    def _form_of_moments(self) -> int:
        kinds: list[int] = (self.fields[Field.FLAGS] & MOMENTS_KIND).tolist()
        for index, kind in enumerate(kinds):
            if kind != kinds[0]:
                raise InvalidTensor(
                    "the moments of one launch must have one form, and tensor 0 has "
                    f"{_FORMS[kinds[0]]} moments and tensor {index} has {_FORMS[kind]} ones; launch them separately"
                )
        return kinds[0] if kinds else 0

    def _pack_layouts(self) -> None:
        flat: list[int] = []
        for index, record in enumerate(self._records):
            if record is not None:
                self.fields[Field.LAYOUT, index] = len(flat)
                flat += record
        self.layouts = torch.tensor(flat or [0], dtype=torch.int64, device="cpu")


def _column(index: int, memory: TensorMemory, record: list[int] | None) -> list[int]:
    def pointer(tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        check_has_memory(f"every tensor of column {index}", tensor)
        return tensor.data_ptr()

    def output(out: Tensor | None, default: Tensor | None) -> int:
        return pointer(default if out is None else out)

    column = [0] * len(Field)
    column[Field.PARAM] = pointer(memory.parameter)
    column[Field.PARAM_OUT] = output(memory.parameter_out, memory.parameter)
    column[Field.GRAD] = pointer(memory.gradient)
    column[Field.EXP_AVG] = pointer(memory.exp_avg)
    column[Field.EXP_AVG_OUT] = output(memory.exp_avg_out, memory.exp_avg)
    column[Field.EXP_AVG_SQ] = pointer(memory.exp_avg_sq)
    column[Field.EXP_AVG_SQ_OUT] = output(memory.exp_avg_sq_out, memory.exp_avg_sq)
    column[Field.MAX_EXP_AVG_SQ] = pointer(memory.max_exp_avg_sq)
    column[Field.MAX_EXP_AVG_SQ_OUT] = output(memory.max_exp_avg_sq_out, memory.max_exp_avg_sq)
    column[Field.COPY] = pointer(memory.copy)
    column[Field.REMAINDER] = pointer(memory.remainder)
    column[Field.NUMEL] = memory.gradient.numel()
    column[Field.LAYOUT] = -1
    column[Field.STEP] = pointer(memory.step)

    flags = _GRAD_FLAG[memory.gradient.dtype]
    if memory.copy is not None:
        flags |= _COPY_FLAG[memory.copy.dtype]
    if memory.max_exp_avg_sq is not None:
        flags |= Flag.AMSGRAD
    if memory.exp_avg is not None and memory.exp_avg.dtype is not torch.float32:
        flags |= Flag.MOMENTS_PACKED if memory.exp_avg_sq is None else Flag.MOMENTS_BF16
    if memory.first:
        flags |= Flag.FIRST
    if memory.remainder is not None:
        flags |= Flag.SPLIT
    column[Field.FLAGS] = int(flags | _layout_flag(column, record))
    return column


def _layout_flag(column: Sequence[int], record: list[int] | None) -> Flag:
    if record is not None:
        return Flag.STRIDED
    return Flag(0) if any(column[field] % 16 for field in range(Field.PARAM, Field.NUMEL)) else Flag.ALIGNED
