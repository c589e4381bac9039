"""Plans: what a long-lived optimizer needs to step over the same tensors again and again.

A plan is one C++ object. It knows what parameters and state looked like when its launch table was built, finds the
gradients of a step, and notices what changed; on a CPU it also takes the whole step in the same call. It holds no
tensor: what is taken out of an optimizer is freed at once.

The C++ functions are called through ctypes with the interpreter lock held, the CPU step as a function of Python's own
kind, which takes less time to reach. The dispatcher would take longer than the update of many small tensors does.
"""

from __future__ import annotations

import ctypes
import functools
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .kernels import library, select
from .kernels.decision import MAX_NORM as MAX_NORM
from .kernels.decision import DecisionMemory as DecisionMemory
from .kernels.device_table import capturing as capturing
from .kernels.device_table import keep_for_graphs as keep_for_graphs
from .kernels.device_table import one_step as one_step
from .kernels.device_table import upload_settings
from .kernels.memory import reach
from .kernels.tables import COEFFICIENTS, Field, LaunchTable
from .stats_plan import ROW_ELEMENTS

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from .kernels.tables import TensorMemory

upload = upload_settings  # an optimizer sends settings only

_DLPACK_MAJOR = 1
UNKNOWN = -1
"""In place of a column: the parameter had no gradient yet."""
EMPTY = -2
"""In place of a column: the parameter has no elements."""
_BOUND, _CHANGED, _SKIPPED, _UNREAD = -1, -2, -3, -4
GROUP_KEYS = ("params", "lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
"""What of a parameter group a step reads."""
_KEPT_SELECTIONS = 16
"""Sets of active columns whose tables a plan keeps for accelerators; making one anew costs an upload."""


class _Reader(ctypes.Structure):
    """What the C++ functions need of Python and torch."""

    _fields_ = (
        ("exchange", ctypes.c_void_p),
        ("grad", ctypes.py_object),
        ("local", ctypes.py_object),
        ("is_neg", ctypes.py_object),
        ("increment_version", ctypes.py_object),
        ("group_keys", ctypes.py_object * len(GROUP_KEYS)),
    )


class _Step(ctypes.Structure):
    """A CPU step, as csrc/plan.h declares it."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fields", "layouts", "groups", "hyperparameters", "report", "decision")),
        *((name, ctypes.c_void_p) for name in ("counts", "coefficients", "rows")),
        ("chunk", ctypes.c_int64),
        ("updated", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("measured", "check_finite", "stages")),
    )


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
        # Torch's function in C, not its wrapper in Python, on whose way a signal handler could run and raise.
        increment_version = getattr(torch._C, "_increment_version", torch.autograd.graph.increment_version)
        is_neg = torch._C.TensorBase.is_neg
        keys = (ctypes.py_object * len(GROUP_KEYS))(*GROUP_KEYS)  # type: ignore[misc]
        self.reader = _Reader(exchange, "grad", "_local_tensor", is_neg, increment_version, keys)
        opened = ctypes.PyDLL(library.path())
        thing, memory, number = ctypes.py_object, ctypes.c_void_p, ctypes.c_int64

        def function(name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
            found = getattr(opened, name)
            found.restype, found.argtypes = result, arguments
            return found  # type: ignore[no-any-return]

        self.new = function("ruda_plan_new", memory, memory, memory, number, thing, memory, memory, memory)
        self.free = function("ruda_plan_free", None, memory)
        self.watch = function("ruda_plan_watch", ctypes.c_bool, memory, thing, thing, memory)
        self.near_written = function("ruda_plan_near_written", ctypes.c_bool, memory, number, number)
        self.fits = function("ruda_plan_fits", ctypes.c_bool, memory, thing)
        self.bind = function("ruda_plan_bind", number, memory, thing, thing, thing, thing, number)
        self.note = function("ruda_plan_note", None, memory, thing)
        self.stepper = function("ruda_plan_stepper", thing, memory, memory)
        self.active = function("ruda_plan_active", number, memory, memory, memory, memory)


_functions = functools.cache(_Functions)


def _numbers(values: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(values))(*values)


class Part:
    """The active columns of one device: one launch of each kernel.

    Attributes:
        table: the columns, with their gradients of this step.
        columns: which columns of the plan they are.
        coefficients: FP32 ``(n, 8)`` on the device, written by the decision.
        rows: FP32 ``(r, 3)`` on the device, the statistics of this step's gradients.
        shares: room for whoever sums the rows over ranks.
    """

    def __init__(self, table: LaunchTable, columns: list[int]) -> None:
        self.table, self.columns = table, columns
        self.kernels = select(table.device)
        self.coefficients = torch.empty((len(table), COEFFICIENTS), dtype=torch.float32, device=table.device)
        rows = table.statistics_rows(self.kernels.statistics_chunk)
        self.rows = torch.empty((rows, ROW_ELEMENTS), dtype=torch.float32, device=table.device)
        self.shares: Any = None

    def report(self, first: int = 0, last: int | None = None) -> Tensor:
        """FP32 ``(3,)`` on the device: bad, scale, sumsq of the rows ``[first, last)``; of all by default."""
        report = torch.empty(ROW_ELEMENTS, dtype=torch.float32, device=self.table.device)
        self.kernels.merge_gradient_stats(self.rows[first:last], report)
        return report


class Plan:
    """The launch table of an optimizer's parameters, and what it was built from.

    Args:
        groups: the parameters of each parameter group.
        columns: one per parameter of all groups: its column in the table, ``UNKNOWN`` or ``EMPTY``.
        memories: one per column. Gradients that are not there yet are described by any tensor of their form.
        devices: the device of each column.
        members: the parameter group of each column.
        sharded: whether each parameter is a DTensor; its ``_local_tensor`` is then looked at.

    Attributes:
        table: the launch table; ``Field.COEFFICIENTS`` holds the parameter group of each column.
        positions: which parameter each column is.
        group_sizes: number of parameters of each group.
        has_empty: whether a parameter has no elements.
        skipped: whether the last step on the CPU was skipped.
    """

    def __init__(
        self,
        groups: list[list[Tensor]],
        columns: list[int],
        memories: list[TensorMemory],
        devices: list[torch.device],
        members: list[int],
        sharded: list[bool],
    ) -> None:
        self._call = _functions()
        self.devices = devices
        self._one_device = len(set(devices)) == 1
        self.home = devices[0] if devices else None
        self.table = LaunchTable(memories, self.home or torch.device("cpu"), hold=False)
        self.table.fields[Field.COEFFICIENTS] = torch.tensor(members, dtype=torch.int64, device="cpu")
        self.members = members
        self.columns = columns
        self.positions = [0] * len(memories)
        for position, column in enumerate(columns):
            if column >= 0:
                self.positions[column] = position
        self._parts: dict[tuple[torch.device, bytes], tuple[int, Part]] = {}
        self.has_empty = EMPTY in columns
        self.group_sizes = [len(group) for group in groups]
        self.skipped = False
        self._held: list[Any] = []
        self._noted: list[tuple[Any, ...]] | None = None
        self._step = _Step()
        self._take_step: Any = None
        self._step_memory: tuple[Any, ...] = ()
        self._active = (ctypes.c_int64 * len(memories))()
        self._updated = (ctypes.c_int64 * len(columns))()
        parameters = [parameter for group in groups for parameter in group]
        storages = [
            0 if column < 0 or part else parameter.untyped_storage()._cdata
            for parameter, column, part in zip(parameters, columns, sharded, strict=True)
        ]
        self._handle = self._call.new(
            ctypes.byref(self._call.reader),
            self.table.fields.data_ptr(),
            len(memories),
            groups,
            _numbers(columns),
            _numbers(sharded),
            _numbers(storages),
        )
        if not self._handle:
            raise RuntimeError("a parameter has no strided memory that can be described")
        weakref.finalize(self, self._call.free, self._handle).atexit = False

    def watch(self, state: dict[Any, dict[str, Any]], tensors: list[Tensor], sharded: list[bool]) -> None:
        """Note what the state consists of, and the memory of ``tensors``, those that the table points into."""
        if not self._call.watch(self._handle, state, tensors, _numbers(sharded)):
            raise RuntimeError("a state tensor has no strided memory that can be described")

    def fits(self, groups: list[list[Tensor]]) -> bool:
        """True if the plan was built for these very parameters."""
        return bool(self._call.fits(self._handle, groups))

    def prepare(self, memory: DecisionMemory, *, measured: bool, check_finite: bool, stages: bool) -> None:
        """Make ready for :meth:`step`, with every active column on the CPU."""
        assert self.home == torch.device("cpu")
        kernels = select(self.home)
        library.level()  # raises where no instruction-set level fits; the C++ plan cannot
        rows = torch.empty(
            (self.table.statistics_rows(kernels.statistics_chunk), ROW_ELEMENTS), dtype=torch.float32, device="cpu"
        )
        coefficients = torch.empty((len(self.table), COEFFICIENTS), dtype=torch.float32, device="cpu")
        fields = self.table.fields
        step = self._step
        step.fields, step.groups = fields.data_ptr(), fields[Field.COEFFICIENTS].data_ptr()
        step.layouts = self.table.layouts.data_ptr()
        step.hyperparameters, step.report = memory.hyperparameters.data_ptr(), memory.report.data_ptr()
        step.decision, step.counts = memory.decision.data_ptr(), memory.counts.data_ptr()
        step.coefficients, step.rows = coefficients.data_ptr(), rows.data_ptr()
        step.chunk = kernels.statistics_chunk
        step.measured, step.check_finite, step.stages = measured, check_finite, stages
        self._step_memory = (memory, rows, coefficients)
        self._take_step = self._call.stepper(self._handle, ctypes.byref(step))

    def note(self, values: list[tuple[Any, ...]] | None) -> None:
        """Note what the hyperparameters in the memory of :meth:`prepare` were read from.

        Args:
            values: for each group its length, and the values of ``GROUP_KEYS`` behind the first; None if they can
                change without becoming other objects.
        """
        self._call.note(self._handle, values)
        self._noted = values  # an object that is gone could have a successor at its address

    def step(
        self,
        groups: list[dict[str, Any]],
        gradients: list[Tensor | None] | None,
        state: dict[Any, dict[str, Any]] | bool | None,
        settle: Callable[[int, Any], Tensor],
        inverse_scale: float,
        found_inf: float,
        read: bool,
    ) -> bool | None:
        """Bind and take the whole step on the CPU; see :meth:`bind` and :meth:`prepare`.

        Args:
            groups: the optimizer's parameter groups.
            read: whether the hyperparameters have just been read.

        Returns:
            None if they have to be read first, because the groups do not hold what was noted.
        """
        step, held = self._take_step, [None] * len(self.columns)
        found = step(groups, gradients, state, held, 0, inverse_scale, found_inf, read)
        while found >= 0:
            if not self._settle(found, held, settle):
                return False
            found = step(groups, gradients, state, held, found + 1, inverse_scale, found_inf, read)
        if found == _UNREAD:
            return None
        self.skipped = found == _SKIPPED
        return bool(found != _CHANGED)

    def bind(
        self,
        groups: list[list[Tensor]],
        gradients: list[Tensor | None] | None,
        state: dict[Any, dict[str, Any]] | bool | None,
        settle: Callable[[int, Any], Tensor],
    ) -> bool:
        """Take over this step's gradients and hold them until :meth:`release`.

        Args:
            groups: the parameters of each group, as when the plan was built.
            gradients: one per parameter, None where it has none; None for the parameters' own ``.grad``.
            state: the optimizer's; True where only the memory of its tensors can have changed, None where nothing can.
            settle: called with a position and a gradient that is not laid out like its parameter, or not of the dtype
                it had; returns the tensor to read, or raises.

        Returns:
            False if the plan is out of date.
        """
        held = self._held = [None] * len(self.columns)
        bound = False
        try:
            found = self._call.bind(self._handle, groups, gradients, state, held, 0)
            while found >= 0 and self._settle(found, held, settle):
                found = self._call.bind(self._handle, groups, gradients, state, held, found + 1)
            bound = found == _BOUND
        finally:
            if not bound:
                self.release()
        return bound

    def release(self) -> None:
        """Let the gradients go."""
        self._held = []

    def _settle(self, position: int, held: list[Any], settle: Callable[[int, Any], Tensor]) -> bool:
        """Put a gradient that is not what the plan expects into the table; False if the plan is out of date."""
        gradient, column = held[position], self.columns[position]
        settled = settle(position, gradient)
        held[position] = (gradient, settled)
        if self._may_be_written(column, settled):
            return False  # a new plan tells whether they share memory, with names
        self.table.set_gradient(column, settled)
        self._step.layouts = self.table.layouts.data_ptr()
        return True

    def _may_be_written(self, column: int, gradient: Tensor) -> bool:
        """Whether a gradient that was elsewhere before may lie in memory that a step writes."""
        start = gradient.data_ptr()
        if int(self.table.fields[Field.GRAD, column]) == start and self.table.describes(column, gradient):
            return False
        return bool(self._call.near_written(self._handle, start, start + reach(gradient)))

    def active(self) -> tuple[list[int], list[int]]:
        """The columns of the step that was bound last, and the positions of its parameters, empty ones included."""
        updated = ctypes.c_int64()
        count = self._call.active(self._handle, self._active, self._updated, ctypes.byref(updated))
        return self._active[:count], self._updated[: updated.value]

    @property
    def stepped(self) -> int:
        """How many parameters the last :meth:`step` had."""
        return int(self._step.updated)

    def count(self) -> int:
        """How many parameters the step that was bound last has."""
        updated = ctypes.c_int64()
        self._call.active(self._handle, self._active, self._updated, ctypes.byref(updated))
        return updated.value

    def updated(self, groups: list[list[Tensor]]) -> list[Tensor]:
        """The parameters of the step that was bound last."""
        parameters = [parameter for group in groups for parameter in group]
        if self.count() == len(parameters):
            return parameters
        return [parameters[position] for position in self.active()[1]]

    def no_part(self, device: torch.device) -> Part:
        """A part without columns: a step without gradients is decided all the same."""
        return Part(self.table.select([], device), [])

    def parts(self) -> list[Part]:
        """The active columns by device, in the order in which the devices appear."""
        columns = self.active()[0]
        if len(columns) == len(self.table) > 0 and self._one_device:
            return [self._part(self.devices[0], columns)]
        by_device: dict[torch.device, list[int]] = {}
        for column in columns:
            by_device.setdefault(self.devices[column], []).append(column)
        return [self._part(device, columns) for device, columns in by_device.items()]

    def _part(self, device: torch.device, columns: list[int]) -> Part:
        """The part of these columns, with this step's gradients; kept while the table's flags and layouts stay."""
        whole = len(columns) == len(self.table)
        key = (device, b"all" if whole else bytes(_numbers(columns)))
        revision, part = self._parts.pop(key, (-1, None))
        if part is None:
            while len(self._parts) >= _KEPT_SELECTIONS:
                del self._parts[next(iter(self._parts))]
            part = Part(self.table if whole else self.table.select(columns, device), columns)
        elif not whole:
            if revision != self.table.revision:
                part.table = self.table.select(columns, device)
            else:
                for field in (Field.GRAD, Field.FLAGS):
                    part.table.fields[field] = self.table.fields[field, columns]
        self._parts[key] = (self.table.revision, part)
        return part

    def native_rows(self) -> Part:
        """What :meth:`step` measured last, as a part."""
        columns, _ = self.active()
        part = self._part(torch.device("cpu"), columns)
        part.rows = self._step_memory[1][: len(part.rows)]
        return part
