"""Which implementation runs an operator on a device, and why. The choice changes speed; quantized bits never.

On the CPU the compiled kernels run whenever they could be built (``kernels.cpu.build``) and know the formats. On a GPU the
Triton kernels run where there are any for the stage and the formats. Else the reference does. :func:`choose` says which, and
the functions below follow it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation
from blockscale.formats import Format, FP8Delayed, Hybrid
from blockscale.kernels.cpu import activation as cpu_activation
from blockscale.kernels.cpu import count as cpu_count
from blockscale.kernels.cpu import gemm as cpu_gemm
from blockscale.kernels.cpu import quantize as cpu_quantize
from blockscale.kernels.cpu import reduce as cpu_reduce
from blockscale.kernels.cpu.blas import bf16_gemm
from blockscale.kernels.cpu.build import load
from blockscale.layouts import PLANES
from blockscale.ops import checks
from blockscale.reference import activations as reference_activations
from blockscale.reference import count as reference_count
from blockscale.reference import dequantize as reference_dequantize
from blockscale.reference import grouped_gemm as reference_gemm
from blockscale.reference import quantize as reference_quantize
from blockscale.tensors import BlockScaledTensor, GroupedTensor, Plane, planes_from_list

#: what each kind of stage runs in the reference backend
_REFERENCE = {
    "quantize": "blockscale.reference.quantize",
    "dequantize": "blockscale.reference.dequantize",
    "gemm": "blockscale.reference.grouped_gemm",
    "activation": "blockscale.reference.activations",
    "reduce": "blockscale.reference.grouped_gemm",
    "routing": "blockscale.reference.routing",
    "count": "blockscale.reference.count",
}
#: what has a compiled CPU kernel; routing is index arithmetic and copies, which torch does at the speed of memory
_CPU = {
    "quantize": "blockscale.kernels.cpu.quantize",
    "gemm": "blockscale.kernels.cpu.gemm",
    "activation": "blockscale.kernels.cpu.activation",
    "reduce": "blockscale.kernels.cpu.reduce",
    "count": "blockscale.kernels.cpu.count",
}
#: what has Triton kernels
_TRITON = {
    "quantize": "blockscale.kernels.quantize",
    "dequantize": "blockscale.kernels.dequantize",
    "activation": "blockscale.kernels.activation",
    "reduce": "blockscale.kernels.sums",
    "joined": "blockscale.kernels.activation",  # activation and quantization in one pass
}
_MAKES_CODES = ("quantize", "dequantize", "joined")
_SUMS = "the reference's meaning, sums in an order of its own"
_ABOUT_TRITON = {
    "activation": "offsets are read on the device; the bits of the reference, ds summed in an order of its own, always the same",
    "reduce": f"two launches for all groups, no atomics; offsets are read on the device; {_SUMS}",
}

_only_reference = False


@dataclass(frozen=True)
class Choice:
    """A backend, its kernel, the reason, and the bytes of workspace that it is handed."""

    backend: str
    kernel: str
    why: str
    workspace_bytes: int


def choose(stage: str, device: torch.device, *formats: Format | None) -> Choice:
    """The implementation of a kind of stage on ``device``.

    Args:
        stage: "quantize", "dequantize", "gemm", "activation", "joined" (those two in one pass), "reduce", "routing" or "count".
        formats: of what is quantized, or of the operands that are multiplied; None for a high-precision operand.
    """
    if device.type == "cuda":
        why = against_triton(stage, device, *formats)
        if why is None and stage not in _MAKES_CODES:
            return Choice("triton", _TRITON[stage], _ABOUT_TRITON[stage], 0)
        if why is None:
            parts = [part for f in formats if f is not None for part in _parts(f)]
            how = ", ".join(dict.fromkeys(triton_quantize().about(f) for f in parts))
            names = ", ".join(dict.fromkeys(triton_quantize().kernel(f) for f in parts))
            if stage == "dequantize":
                how, names = "one launch for all groups", _TRITON[stage]
            elif any(f is not None and f.from_row for f in formats):
                how += "; the values of the rowwise plane pass through memory as float32 on their way to the columnwise one"
            return Choice("triton", names, f"{how}; offsets are read on the device; the bits of the reference", 0)
        return Choice("reference", _REFERENCE[stage], why, 0)
    why = _against_cpu(stage, device, *formats)
    if why is not None:
        return Choice("reference", _REFERENCE[stage], why, 0)
    what = {"gemm": _products(), "reduce": _SUMS}.get(stage, "the bits of the reference")
    return Choice("cpu", _CPU[stage], f"{load().why}; {what}", 0)


def _against_cpu(stage: str, device: torch.device, *formats: Format | None) -> str | None:
    """Why the compiled CPU kernel does not run; None: it does."""
    if device.type != "cpu":
        why = f"no {device.type} kernel yet: plain torch on the device"
        return why + ("; reads the offsets on the host, so it syncs and cannot be captured" if stage in ("gemm", "reduce") else "")
    if stage not in _CPU:
        return "the only backend for the CPU: plain torch, temporaries from torch's allocator, freed on return"
    if _only_reference:
        return "asked for by a test"
    if load().library is None:
        return f"plain torch, because the faster cpu backend is not there: {load().why}"
    for fmt in formats:
        if fmt is not None and not _covered(fmt):
            return f"plain torch, because the faster cpu backend has no code for {fmt.label}"
    return None


def _covered(fmt: Format) -> bool:
    """Whether the compiled kernels know a format; a plane made of the other one's values is two quantizations."""
    if isinstance(fmt, FP8Delayed):
        return False
    return all(cpu_quantize.covers(fmt.stored(plane)) for plane in PLANES)


def _parts(fmt: Format) -> list[Format]:
    """The formats whose kernels run for one: of each plane, where these differ or one is made of the other."""
    return [fmt] if isinstance(fmt, FP8Delayed) else list(dict.fromkeys(fmt.stored(plane) for plane in PLANES))


def against_triton(stage: str, device: torch.device, *formats: Format | None) -> str | None:
    """Why no Triton kernel runs on a CUDA device; None: one does."""
    plain = "plain torch on the device"
    if stage not in _TRITON:
        why = f"{plain}, because there is no kernel of this stage yet"
        return why + ("; reads the offsets on the host, so it syncs and cannot be captured" if stage == "gemm" else "")
    if _only_reference:
        return "asked for by a test"
    if triton_quantize() is None:
        return f"{plain}, because triton cannot be imported"
    if stage not in _MAKES_CODES:
        return None
    if not torch.cuda.is_available() or torch.cuda.get_device_capability(device) < (8, 9):
        return f"{plain}, because the device converts nothing to FP8 (compute capability 8.9 and newer do)"
    for fmt in formats:
        if stage == "quantize" and fmt is not None and not all(triton_quantize().covers(part) for part in _parts(fmt)):
            return f"{plain}, because there is no kernel for {fmt.label} yet"
    return None


@lru_cache(maxsize=1)
def triton_quantize() -> Any:
    """``ops.launch.quantize``, or None where triton is not installed. Imported late: a CPU user waits for no compiler."""
    return triton_launch("quantize")


@lru_cache(maxsize=8)
def triton_launch(name: str) -> Any:
    """A module of ``ops.launch``, or None where triton is not installed."""
    try:
        return import_module(f"blockscale.ops.launch.{name}")
    except ImportError:
        return None


def _products() -> str:
    function, why = bf16_gemm()
    if function is None:
        return f"operands decoded by it, products in float32, because {why}"
    return f"{why}, where a group's operands are exact in bfloat16; else float32"


def fast(stage: str, device: torch.device, *operands: Format | GroupedTensor | Tensor) -> bool:
    """Whether the compiled CPU kernels run this kind of stage on operands of these formats."""
    formats = [x.format if isinstance(x, GroupedTensor) else x for x in operands if not isinstance(x, Tensor)]
    return _against_cpu(stage, device, *formats) is None


@contextmanager
def only_reference() -> Iterator[None]:
    """For tests: no compiled kernel runs inside."""
    global _only_reference
    before, _only_reference = _only_reference, True
    try:
        yield
    finally:
        _only_reference = before


def quantize(
    x: Tensor,
    offsets: Tensor | None,
    fmt: Format,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor] | None = None,
    scale: Tensor | None = None,
) -> list[Tensor]:
    """Planes of x (M, K), grouped by ``offsets`` or plain (None), in the operators' order; in ``out`` when given.

    ``scale`` float32 (G,): of ``FP8Delayed``.
    """
    if offsets is not None:
        checks.offset_values(offsets, x.shape[0])
    if isinstance(fmt, Hybrid) and rowwise and columnwise and not fmt.from_row:
        return [
            *quantize(x, offsets, fmt.rowwise, True, False, layout, None, rng, None if out is None else out[:3]),
            *quantize(x, offsets, fmt.columnwise, False, True, layout, None, rng, None if out is None else out[3:]),
        ]
    if isinstance(fmt, FP8Delayed) and scale is None:
        raise ValueError("format fp8delayed quantizes with a scale that is kept between steps, and here is none to give")
    from_row = columnwise and fmt.from_row
    if from_row and _quantize_kernels(x, fmt) is not None:
        return _from_row(x, offsets, fmt, rowwise, layout, amax, rng, out)
    if not from_row and not isinstance(fmt, FP8Delayed):
        fmt = fmt.stored("rowwise" if rowwise else "columnwise")
    kernels, given = _quantize_kernels(x, fmt), () if scale is None else (scale,)
    if kernels is not None:
        if out is None or _separate(x, out):
            return kernels.quantize(x, offsets, fmt, rowwise, columnwise, layout, amax, rng, out, *given)
        planes = kernels.quantize(x, offsets, fmt, rowwise, columnwise, layout, amax, rng)
    elif offsets is None:
        planes = reference_quantize.quantize(x, fmt, rowwise, columnwise, layout, amax, rng, scale)
    else:
        planes = reference_quantize.quantize_grouped(x, offsets, fmt, rowwise, columnwise, layout, amax, rng, scale)
    if out is None:
        return planes
    for target, source in zip(out, planes, strict=True):
        target.copy_(source)
    return out


def _quantize_kernels(x: Tensor, fmt: Format) -> Any:
    """The module whose ``quantize`` runs for a tensor; None: the reference."""
    if x.device.type == "cuda":
        return triton_quantize() if against_triton("quantize", x.device, fmt) is None else None
    return cpu_quantize if fast("quantize", x.device, fmt) else None


def _from_row(
    x: Tensor,
    offsets: Tensor | None,
    fmt: Format,
    rowwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor] | None,
) -> list[Tensor]:
    """A columnwise plane made of the values of the rowwise one, with that before it when it is asked for."""
    row_format, column_format = (fmt.stored(plane) for plane in PLANES)
    own = amax if rowwise or not row_format.scales_rows else None  # a row-scaled amax belongs to the plane that is asked
    row = quantize(x, offsets, row_format, True, False, layout, own, rng)
    plane, shape = planes_from_list(row, row_format, True, False, layout)[0], (x.shape[0], x.shape[1])
    if offsets is None:
        seen = BlockScaledTensor(shape, row_format, plane, None).dequantize()
    else:
        seen = GroupedTensor(shape, row_format, plane, None, offsets).dequantize()
    planes = [*(row if rowwise else []), *quantize(seen, offsets, column_format, False, True, layout, amax, rng)]
    if out is None:
        return planes
    for target, source in zip(out, planes, strict=True):
        target.copy_(source)
    return out


def _separate(x: Tensor, out: list[Tensor]) -> bool:
    """Whether the kernels can write to ``out`` at once: whole tensors, aligned as new ones, in memory that x does not share."""
    memory = x.untyped_storage().data_ptr()
    aligned = x.device.type == "cpu" or all(t.data_ptr() % 16 == 0 for t in out)
    return aligned and all(t.is_contiguous() and t.untyped_storage().data_ptr() != memory for t in out)


def dequantize(plane: Plane, offsets: Tensor | None, shape: tuple[int, int], fmt: Format, which: str, dtype: torch.dtype) -> Tensor:
    """``reference.dequantize`` or the kernels of the same meaning."""
    device = plane.data.device
    if device.type == "cuda" and against_triton("dequantize", device, fmt) is None:
        made = dtype if dtype in checks.FLOATS else torch.float32
        args = (plane.data, plane.scale, plane.amax, offsets, shape, fmt, which, plane.layout, made)
        values: Tensor = import_module("blockscale.ops.launch.dequantize").dequantize(*args)
        return values.to(dtype)
    return reference_dequantize.dequantize(plane, offsets, shape, fmt, which, dtype)


def _one_plane(x: GroupedTensor | Tensor, plane: str) -> GroupedTensor | Tensor:
    """An operand as one plane in the format of its bytes, so that kernels need not know how it was made."""
    if isinstance(x, Tensor):
        return x
    row, column = (x.plane(plane), None) if plane == "rowwise" else (None, x.plane(plane))
    return replace(x, format=x.format.stored(plane), rowwise=row, columnwise=column)


def rows_by_weight(
    a: GroupedTensor | Tensor,
    w: GroupedTensor | Tensor,
    offsets: Tensor,
    capacity: int,
    *,
    transpose: bool,
    out_dtype: torch.dtype,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
) -> Tensor:
    """Forward and dgrad: ``reference.grouped_gemm.rows_by_weight`` or the kernel of the same meaning."""
    a, w = _one_plane(a, "rowwise"), _one_plane(w, "rowwise" if transpose else "columnwise")
    options = {"transpose": transpose, "out_dtype": out_dtype, "bias": bias, "bias_scale": bias_scale}
    if fast("gemm", offsets.device, a, w):
        checks.offset_values(offsets, capacity)
        return cpu_gemm.rows_by_weight(a, w, offsets, capacity, product=reference_gemm.product, **options)  # type: ignore[arg-type]
    return reference_gemm.rows_by_weight(a, w, offsets, capacity, **options)  # type: ignore[arg-type]


def wgrad(dy: GroupedTensor | Tensor, x: GroupedTensor | Tensor, offsets: Tensor, capacity: int) -> Tensor:
    """float32 (G, N, K): ``reference.grouped_gemm.wgrad`` or the kernel of the same meaning."""
    dy, x = _one_plane(dy, "columnwise"), _one_plane(x, "columnwise")
    if fast("gemm", offsets.device, dy, x):
        checks.offset_values(offsets, capacity)
        return cpu_gemm.wgrad(dy, x, offsets, capacity, product=reference_gemm.product)
    return reference_gemm.wgrad(dy, x, offsets, capacity)


def bias_grad(dy: Tensor, offsets: Tensor, scale: Tensor | None = None) -> Tensor:
    """float32 (G, N): sum of each group's rows, times ``scale`` (capacity,) when given."""
    if _on_triton("reduce", dy.device):
        return triton_launch("sums").bias_grad(dy, offsets, scale)
    if fast("reduce", dy.device):
        return cpu_reduce.bias_grad(dy, offsets, scale)
    return reference_gemm.bias_grad(dy, offsets, scale)


def row_dot(dy: Tensor, bias: Tensor, offsets: Tensor) -> Tensor:
    """float32 (capacity,): dy . bias of the row's group; 0 for a dead row."""
    if fast("reduce", dy.device):
        return cpu_reduce.row_dot(dy, bias, offsets)
    return reference_gemm.row_dot(dy, bias, offsets)


def activation_forward(h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, offsets: Tensor | None) -> Tensor:
    """act(h) * probs in h's dtype; rows from ``offsets[-1]`` on are zero, whatever they hold."""
    if _on_triton("activation", h.device):
        return triton_launch("activation").forward(h, act, probs, interleave, offsets)
    if fast("activation", h.device):
        return cpu_activation.forward(h, act, probs, interleave, _live_rows(offsets, h.shape[0]))
    return reference_activations.activation_forward(h, act, probs, interleave, _live_mask(offsets, h))


def activation_backward(
    dy: Tensor, h: Tensor, act: Activation, probs: Tensor | None, interleave: int | None, offsets: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """(dh in h's dtype, ds float32 (rows,) or None without probs); dead rows as in :func:`activation_forward`."""
    if _on_triton("activation", h.device):
        return triton_launch("activation").backward(dy, h, act, probs, interleave, offsets)
    if fast("activation", h.device):
        return cpu_activation.backward(dy, h, act, probs, interleave, _live_rows(offsets, h.shape[0]))
    return reference_activations.activation_backward(dy, h, act, probs, interleave, _live_mask(offsets, h))


def _on_triton(stage: str, device: torch.device) -> bool:
    return device.type == "cuda" and against_triton(stage, device) is None


def _live_rows(offsets: Tensor | None, rows: int) -> int:
    return rows if offsets is None else int(offsets[-1])


def _live_mask(offsets: Tensor | None, h: Tensor) -> Tensor | None:
    return None if offsets is None else torch.arange(h.shape[0], device=h.device) < offsets[-1]


def count_into(out: Tensor, x: Tensor, offsets: Tensor, q: GroupedTensor | None, call: int) -> None:
    """``reference.count.count_into`` or the kernel of the same meaning."""
    one = None if q is None else _one_plane(q, "rowwise")
    assert not isinstance(one, Tensor)
    if fast("count", x.device) and x.dtype in cpu_quantize.DTYPES:
        return cpu_count.count_into(out, x, offsets, one, call)
    return reference_count.count_into(out, x, offsets, one, call)


def count_finite(out: Tensor, x: Tensor, offsets: Tensor | None) -> bool:
    """``reference.count.count_finite`` or the kernel of the same meaning."""
    if fast("count", x.device) and x.dtype in cpu_quantize.DTYPES:
        return cpu_count.count_finite(out, x, offsets)
    return reference_count.count_finite(out, x, offsets)
