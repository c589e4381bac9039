"""What a parameter, its gradient and its optimizer's state take in memory: arithmetic, no measurement.

:func:`estimate` counts the tensors that :class:`ruda_torch.AdamW` holds; :func:`estimate_others` counts those of other
optimizers by their published formats, each with its source. Both give bytes per element. ``ruda-optim memory`` prints
them for a number of parameters. Standard library only.

Left out, because it does not grow with the number of elements or is small beside it: step counts, the workspace of the
statistics (12 bytes for some 65,536 elements), lookup tables of quantized states (2 KiB a tensor in torchao), what
small tensors keep in FP32 (below 4,096 elements in bitsandbytes and torchao), activations, and a framework's copies.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from .fused_adamw.errors import InvalidOption

DTYPES = {"float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of one element of a parameter or gradient."""
SHORT_DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
MASTERS = {"fp32": 4, "split": 2, "none": 0}
"""Bytes an element of each kind of master: an FP32 copy, 16 bits beside a BF16 parameter, nothing."""
MOMENTS = {"float32": 8, "bfloat16": 4, "packed16": 2}
"""Bytes an element of both moments together, in each form that ``AdamW(moments=...)`` offers."""
_MAXIMUM = {"float32": 4, "bfloat16": 2, "packed16": 2}  # of AMSGrad; a stored v is a BF16 number in both low forms


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes per element that one optimizer needs; fractions, because a scale is shared by a block of elements.

    Attributes:
        optimizer: its name.
        keeps: the form of master and moments, in words.
        parameter: the model's tensor.
        gradient: its gradient.
        master: what is kept beside a half parameter so that small updates are not lost.
        moments: both moments, and AMSGrad's maximum.
        traffic: bytes that one step reads and writes per element, by its source code, without the pass over the
            gradients (one more reading of them) that a finite check or clipping adds; None for other optimizers.
        source: where the figures come from.
    """

    optimizer: str
    keeps: str
    parameter: Fraction
    gradient: Fraction
    master: Fraction
    moments: Fraction
    traffic: Fraction | None
    source: str

    @property
    def total(self) -> Fraction:
        """Parameter, gradient, master and moments together, in bytes per element."""
        return self.parameter + self.gradient + self.master + self.moments

    def of(self, parameters: int | float) -> dict[str, int]:
        """Whole bytes of ``parameter``, ``gradient``, ``master``, ``moments`` and ``total`` of a model.

        Args:
            parameters: number of elements of all parameters together, at least 1.
        """
        count = parameter_count(parameters)
        names = ("parameter", "gradient", "master", "moments")
        sizes = {name: math.ceil(count * getattr(self, name)) for name in names}
        return {**sizes, "total": sum(sizes.values())}


def parameter_count(parameters: int | float | str) -> int:
    """The number of parameters as a whole number; ``"8e9"`` and ``8e9`` are 8,000,000,000.

    Raises:
        InvalidOption: not a number, not finite, not whole, or less than 1.
    """
    try:
        count = float(parameters)
    except (ValueError, OverflowError, TypeError):
        count = math.nan
    if not (count >= 1 and count.is_integer()):
        raise InvalidOption(f"the number of parameters must be whole and at least 1, for example 8e9, got {parameters}")
    return parameters if isinstance(parameters, int) else int(count)


def estimate(
    dtype: str = "float32",
    *,
    gradient_dtype: str | None = None,
    masters: str | None = None,
    moments: str | None = None,
    amsgrad: bool = False,
) -> tuple[MemoryEstimate, ...]:
    """Bytes per element of :class:`ruda_torch.AdamW` with ``fused_step=True``, one entry for each choice left open.

    Args:
        dtype: of the parameters: ``"float32"``, ``"float16"`` or ``"bfloat16"``, or ``"fp32"``, ``"fp16"``, ``"bf16"``.
        gradient_dtype: of the gradients; default: that of the parameters.
        masters: ``"fp32"``, ``"split"`` (BF16 parameters only) or ``"none"`` (FP32 parameters only, which are their own
            masters); default: all that ``dtype`` has.
        moments: ``"float32"``, ``"bfloat16"`` or ``"packed16"``; default: all.
        amsgrad: with the running maximum of the second moment, in FP32 beside FP32 moments, else in BF16.

    Raises:
        InvalidOption: a name that is not among these, or a kind of master that ``dtype`` does not have.
    """
    dtype = _dtype("dtype", dtype)
    gradient = Fraction(DTYPES[_dtype("gradient_dtype", gradient_dtype or dtype)])
    parameter = Fraction(DTYPES[dtype])
    rows = []
    for master_kind in _masters(dtype, masters):
        for form in MOMENTS if moments is None else (_one_of("moments", moments, MOMENTS),):
            master = Fraction(MASTERS[master_kind])
            state = Fraction(MOMENTS[form] + amsgrad * _MAXIMUM[form])
            own = "" if master_kind == "none" else f", {'FP32' if master_kind == 'fp32' else master_kind} master"
            rows.append(
                MemoryEstimate(
                    optimizer="ruda_torch.AdamW",
                    keeps=f"{form} moments{own}",
                    parameter=parameter,
                    gradient=gradient,
                    master=master,
                    moments=state,
                    traffic=gradient + 2 * (parameter + master + state),  # all but the gradient is read and written
                    source="the tensors that ruda_torch.AdamW keeps in its state",
                )
            )
    return tuple(rows)


def estimate_others(
    dtype: str = "float32", *, gradient_dtype: str | None = None, amsgrad: bool = False
) -> tuple[MemoryEstimate, ...]:
    """Bytes per element of other optimizers for the same parameters, by their published formats.

    - ``torch.optim.AdamW``: moments in the parameter's dtype (torch/optim/adamw.py). For half parameters also the usual
      mixed precision, FP32 parameters and gradients under autocast, without autocast's copies of the weights.
    - apex ``FusedAdam(master_weights=True)``: FP32 moments and an FP32 copy of half parameters
      (apex/optimizers/fused_adam.py).
    - ``DeepSpeedCPUAdam`` with ZeRO-Offload: FP32 copy and moments, 12 bytes, in host memory (Rajbhandari et al. 2020,
      arXiv:1910.02054, section 3.1; Ren et al. 2021, arXiv:2101.06840).
    - bitsandbytes ``AdamW8bit``: two one-byte codes and two FP32 scales per block of 256 (Dettmers et al. 2022,
      arXiv:2110.02861; bitsandbytes/optim/optimizer.py).
    - torchao ``AdamW8bit``, ``AdamWFp8``: the same sizes; ``AdamW4bit``: two half-byte codes in blocks of 128
      (torchao/optim).
    - FlashOptim ``FlashAdamW``: two one-byte codes and two FP16 scales per group of 32; beside half parameters 8 bits
      of a 24-bit master, or 16 of a 32-bit one (arXiv:2602.23349; github.com/databricks/flashoptim at 8b2d966e).

    Args:
        dtype: as for :func:`estimate`.
        gradient_dtype: as for :func:`estimate`.
        amsgrad: torch's alone, with its maximum; the others have no AMSGrad, or refuse to step with it (torchao 0.18).

    Raises:
        InvalidOption: an unknown dtype.
    """
    dtype = _dtype("dtype", dtype)
    size = DTYPES[dtype]
    gradient = DTYPES[_dtype("gradient_dtype", gradient_dtype or dtype)]
    half = size == 2
    copy = 4 if half else 0
    tensors = 3 if amsgrad else 2

    def row(optimizer: str, keeps: str, master: float, moments: Fraction | int, source: str) -> MemoryEstimate:
        return MemoryEstimate(
            optimizer, keeps, Fraction(size), Fraction(gradient), Fraction(master), Fraction(moments), None, source
        )

    def blocks(bits: int, scale_bytes: int, block: int) -> Fraction:
        return 2 * (Fraction(bits, 8) + Fraction(scale_bytes, block))

    torch_source = "torch/optim/adamw.py: zeros_like(parameter)"
    plain = "all in the parameter's dtype, no master" if half else "FP32 moments"
    rows = [row("torch.optim.AdamW", plain, 0, tensors * size, torch_source)]
    if half:
        autocast = (Fraction(4), Fraction(4), Fraction(0), Fraction(4 * tensors), None)
        rows.insert(0, MemoryEstimate("torch.optim.AdamW", "FP32 parameters, autocast", *autocast, torch_source))
    if amsgrad:
        return tuple(rows)
    with_copy = "FP32 moments" + (", FP32 master" if half else "")
    no_copy = ", no master" if half else ""
    ao_source = "torchao/optim: codes and FP32 scales, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py"
    rows += [
        row("torchao AdamW8bit", f"8-bit moments, blocks of 256{no_copy}", 0, blocks(8, 4, 256), ao_source),
        row("torchao AdamW4bit", f"4-bit moments, blocks of 128{no_copy}", 0, blocks(4, 4, 128), ao_source),
    ]
    flash_source = "arXiv:2602.23349; databricks/flashoptim, flashoptim/optimizers.py"
    flash = "8-bit moments, groups of 32"
    rows += [
        row("apex FusedAdam", with_copy, copy, 8, "apex/optimizers/fused_adam.py: zeros_like(p).float()"),
        row(
            "DeepSpeedCPUAdam", f"{with_copy}, on the host", copy, 8, "arXiv:1910.02054, section 3.1; arXiv:2101.06840"
        ),
        row(
            "bitsandbytes AdamW8bit",
            f"8-bit moments, blocks of 256{no_copy}",
            0,
            blocks(8, 4, 256),
            "arXiv:2110.02861; bitsandbytes/optim/optimizer.py",
        ),
        *(
            row("FlashAdamW", f"{flash}, {bits}-bit master", bits // 8 - 2, blocks(8, 2, 32), flash_source)
            for bits in ((24, 32) if half else ())
        ),
    ]
    if not half:
        rows.append(row("FlashAdamW", flash, 0, blocks(8, 2, 32), flash_source))
    return tuple(rows)


def _one_of(what: str, value: str, known: dict[str, int]) -> str:
    if value not in known:
        raise InvalidOption(f"{what} must be one of {', '.join(known)}, got {value!r}")
    return value


def _dtype(what: str, value: str) -> str:
    name = SHORT_DTYPES.get(value, value)
    if name not in DTYPES:
        raise InvalidOption(f"{what} must be one of {', '.join((*DTYPES, *SHORT_DTYPES))}, got {value!r}")
    return name


def _masters(dtype: str, asked: str | None) -> tuple[str, ...]:
    """The kinds of master of a parameter of this dtype; all of them, or the one asked for."""
    kinds = {"float32": ("none",), "float16": ("fp32",), "bfloat16": ("fp32", "split")}[dtype]
    if asked is None:
        return kinds
    _one_of("masters", asked, MASTERS)
    if asked not in kinds:
        reason = {
            "float32": "an FP32 parameter is its own master",
            "float16": "FP16 is not the upper half of FP32, and updates of a half parameter without a master are lost",
            "bfloat16": "without a master, small updates of a half parameter are lost",
        }[dtype]
        raise InvalidOption(f"masters must be {' or '.join(kinds)} for {dtype} parameters, got {asked}: {reason}")
    return (asked,)
