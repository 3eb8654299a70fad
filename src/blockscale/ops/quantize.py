"""The operators ``quantize`` and ``quantize_grouped`` and their public functions.

Legend: M rows, K columns, G groups.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from blockscale.formats import Format, FP8Delayed, Hybrid, parse
from blockscale.layouts import LAYOUTS
from blockscale.ops import backend, checks, registry
from blockscale.tensors import BlockScaledTensor, GroupedTensor, planes_from_list
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype


def rng_from(generator: torch.Generator | None, device: torch.device) -> Tensor:
    """int64[2] (seed, offset 0) drawn from ``generator`` (None: torch's default) on its own device."""
    if generator is not None and not isinstance(generator, torch.Generator):
        raise TypeError(f"generator is {type(generator).__name__}; a torch.Generator or None is needed")
    source = device if generator is None else generator.device
    seed = torch.randint(-(2**63), 2**63 - 1, (1,), generator=generator, device=source)
    return torch.cat((seed, torch.zeros_like(seed))).to(device)


def quantize(
    x_MK: Tensor,
    fmt: Format,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    layout: str = "compact",
    amax: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    scale: Tensor | None = None,
    out: BlockScaledTensor | None = None,
) -> BlockScaledTensor:
    """Quantize a matrix to a block-scaled format.

    Args:
        x_MK: (M, K) float32, bfloat16 or float16, any strides, K >= 1.
        fmt: the format.
        rowwise, columnwise: which planes: blocks along K, blocks along M.
        layout: of the scales: "compact", "swizzled", "swizzled_8x4" or "linear" (FP8 formats: "compact" or "linear",
            which are the same).
        amax: float32 [1] to use instead of the tensor's own amax, or [2, 1] (rowwise; columnwise, after the transform if
            there is one). NVFP4 and FP8Tensor only. Row-scaled NVFP4: with one plane asked, in the shape of its amax.
        generator: source of random bits for ``stochastic=True``; None: torch's default.
        rng: int64[2] (seed, offset) on x's device, instead of ``generator``.
        scale: float32 [1] that values are multiplied by: of FP8Delayed, which needs it. Its planes keep the tensor's own amax.
        out: a result to overwrite, made by the same call; no memory is kept besides. Not of FP8Delayed.

    Returns:
        The quantized tensor (``out`` if given).

    Raises:
        TypeError: a wrong dtype or type.
        ValueError: a wrong shape, layout, device or combination.

    Example: ``quantize(torch.full((1, 32), 448.0), MXFP8())`` has one live scale code, 127, and 32 codes 0x7E.

    Source: OCP microscaling formats 1.0 (MX); NVIDIA cuDNN and Transformer Engine documentation (NVFP4, FP8 scaling).
    """
    x = checks.matrix("x", x_MK)
    check_options(fmt, rowwise, columnwise, layout, LAYOUTS)
    amax = _check_amax(amax, fmt, x, None, rowwise, columnwise)
    rng = check_rng(rng, generator, fmt, x)
    _check_scale(scale, fmt, x, 1, out)
    shape = (x.shape[0], x.shape[1])
    if out is not None:
        targets = _out_tensors(out, BlockScaledTensor, fmt, shape, rowwise, columnwise, layout)
        torch.ops.blockscale.quantize_out(x, fmt.spec(), rowwise, columnwise, layout, amax, rng, targets)
        return out
    if scale is not None:
        tensors = torch.ops.blockscale.quantize_scaled(x, None, fmt.spec(), rowwise, columnwise, layout, scale)
    else:
        tensors = torch.ops.blockscale.quantize(x, fmt.spec(), rowwise, columnwise, layout, amax, rng)
    row, column = planes_from_list(tensors, fmt, rowwise, columnwise, layout)
    return BlockScaledTensor(shape, fmt, row, column)


def quantize_grouped(
    x: Tensor,
    offsets: Tensor | None,
    fmt: Format,
    *,
    rowwise: bool = True,
    columnwise: bool = False,
    layout: str = "compact",
    amax: Tensor | None = None,
    generator: torch.Generator | None = None,
    rng: Tensor | None = None,
    scale: Tensor | None = None,
    out: GroupedTensor | None = None,
) -> GroupedTensor:
    """Quantize the groups of rows of one buffer; each result equals ``quantize`` of that group's rows.

    Args:
        x: (capacity, K); rows past ``offsets[-1]`` are never read into a result. Or weights (G, N, K) with
            ``offsets=None``: G groups of N rows.
        offsets: int64[G+1] on x's device, from 0, never decreasing.
        layout: "compact" or "swizzled" (FP8 formats: "compact").
        amax: float32 [G], or [2, G]. scale: float32 [G].
        fmt, rowwise, columnwise, generator, rng, out, raises: as :func:`quantize`.
    """
    matrix_rows = None
    if offsets is None:
        checks.dtype("x", x, checks.FLOATS)
        if x.dim() != 3:
            raise ValueError(f"x has shape {tuple(x.shape)} and offsets is None; (G, N, K) weights are needed then")
        matrix_rows = x.shape[1]
        offsets = torch.arange(x.shape[0] + 1, device=x.device) * matrix_rows
        x = x.flatten(0, 1)
    x = checks.matrix("x", x, "capacity")
    offsets = checks.offsets(offsets)
    checks.same_device(x=x, offsets=offsets)
    check_options(fmt, rowwise, columnwise, layout, ("compact", "swizzled"))
    amax = _check_amax(amax, fmt, x, offsets.shape[0] - 1, rowwise, columnwise)
    rng = check_rng(rng, generator, fmt, x)
    shape = (x.shape[0], x.shape[1])
    _check_scale(scale, fmt, x, offsets.shape[0] - 1, out)
    args = (x, offsets, fmt.spec(), rowwise, columnwise, layout, amax, rng)
    if out is not None:
        targets = _out_tensors(out, GroupedTensor, fmt, shape, rowwise, columnwise, layout)
        checks.shape("out.offsets", out.offsets, tuple(offsets.shape), "as offsets")
        torch.ops.blockscale.quantize_grouped_out(*args, [*targets, out.offsets])
        return out
    if scale is not None:
        tensors = torch.ops.blockscale.quantize_scaled(*args[:6], scale)
    else:
        tensors = torch.ops.blockscale.quantize_grouped(*args)
    row, column = planes_from_list(tensors, fmt, rowwise, columnwise, layout)
    return GroupedTensor(shape, fmt, row, column, offsets, matrix_rows)


def check_options(fmt: object, rowwise: bool, columnwise: bool, layout: str, legal: tuple[str, ...]) -> None:
    """Raise unless the format, the planes and the layout go together; ``legal``: layouts of this kind of tensor."""
    if not isinstance(fmt, Format) or type(fmt) is Format:
        raise TypeError(f"fmt is {type(fmt).__name__}; a format such as MXFP8() is needed")
    for name, value in (("rowwise", rowwise), ("columnwise", columnwise)):
        checks.flag(name, value)
    if not (rowwise or columnwise):
        raise ValueError("rowwise=False and columnwise=False: at least one plane must be asked for")
    if not fmt.has_codes:
        legal = tuple(name for name in legal if "swizzled" not in name)
    if layout not in legal:
        raise ValueError(f"layout={layout!r} is not legal for {fmt.kind} here; legal: {', '.join(map(repr, legal))}")


def _check_amax(
    amax: Tensor | None, fmt: Format, x: Tensor, num_groups: int | None, rowwise: bool, columnwise: bool
) -> Tensor | None:
    if amax is None:
        return None
    if isinstance(fmt, Hybrid):
        raise ValueError("amax is given but the planes have formats of their own; quantize them one at a time")
    if not fmt.has_amax or isinstance(fmt, FP8Delayed):
        raise ValueError(f"amax is given but {fmt.kind} has no global scale; leave it None")
    checks.dtype("amax", amax, (torch.float32,))
    if fmt.scales_rows:
        if rowwise and columnwise:
            raise ValueError("amax is given and both planes are asked; a row-scaled format takes the amax of one plane at a time")
        expected = amax_shape(fmt, "rowwise" if rowwise else "columnwise", x.shape[0], x.shape[1], num_groups)
        checks.shape("amax", amax, expected, "one a row of the stored plane")
        return amax
    groups = 1 if num_groups is None else num_groups
    if tuple(amax.shape) not in ((groups,), (2, groups)):
        raise ValueError(f"amax has shape {tuple(amax.shape)}; ({groups},) or (2, {groups}) is needed")
    checks.same_device(x=x, amax=amax)
    if amax.device.type == "cpu" and not torch.compiler.is_compiling() and not isinstance(amax, FakeTensor):
        wrong = amax[~(amax >= 0)]
        if wrong.numel():
            raise ValueError(f"amax holds {wrong[0].item()}; a largest magnitude is needed, >= 0 and not NaN")
    return amax


def _check_scale(scale: Tensor | None, fmt: Format, x: Tensor, groups: int, out: object) -> None:
    if isinstance(fmt, FP8Delayed) != (scale is not None):
        what = "is given but the format makes its own" if scale is not None else "is None; float32, one a group, is needed"
        raise ValueError(f"scale {what}: {fmt.kind}")
    if scale is not None:
        checks.shape("scale", checks.dtype("scale", scale, (torch.float32,)), (groups,), "one a group")
        checks.same_device(x=x, scale=scale)
        if out is not None:
            raise ValueError("out is not supported for fp8delayed; it returns new tensors")


def check_rng(rng: Tensor | None, generator: torch.Generator | None, fmt: Format, x: Tensor) -> Tensor | None:
    """The rng to use: none without stochastic rounding, the one given, or one drawn from ``generator``."""
    if rng is not None:
        checks.same_device(x=x, rng=checks.rng(rng))
    if not getattr(fmt, "stochastic", False):
        return None
    if rng is None:
        return rng_from(generator, x.device)
    if generator is not None:
        raise ValueError("rng and generator are both given; one of them is needed")
    return rng


def _out_tensors(
    out: object, kind: type, fmt: Format, shape: tuple[int, int], rowwise: bool, columnwise: bool, layout: str
) -> list[Tensor]:
    if not isinstance(out, (BlockScaledTensor, GroupedTensor)) or not isinstance(out, kind):
        raise TypeError(f"out is {type(out).__name__}; a {kind.__name__} is needed")
    if out.shape != shape or out.format != fmt:
        raise ValueError(f"out is {out.shape} {out.format.spec()}; {shape} {fmt.spec()} is needed")
    targets: list[Tensor] = []
    for name, asked in (("rowwise", rowwise), ("columnwise", columnwise)):
        plane = getattr(out, name)
        if (plane is not None) != asked:
            raise ValueError(f"out.{name} is {'absent' if asked else 'there'} but {name}={asked}")
        if plane is not None:
            if plane.layout != layout:
                raise ValueError(f"out.{name}.layout={plane.layout!r} but layout={layout!r}")
            targets += (
                plane.data,
                plane.scale,
                plane.data.new_empty(0, dtype=torch.float32) if plane.amax is None else plane.amax,
            )
    return targets


def _quantize(
    x: Tensor, fmt: str, rowwise: bool, columnwise: bool, layout: str, amax: Tensor | None, rng: Tensor | None
) -> list[Tensor]:
    return backend.quantize(x, None, parse(fmt), rowwise, columnwise, layout, amax, rng)


def _quantize_grouped(
    x: Tensor,
    offsets: Tensor,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
) -> list[Tensor]:
    return backend.quantize(x, offsets, parse(fmt), rowwise, columnwise, layout, amax, rng)


def _quantize_out(
    x: Tensor,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor],
) -> None:
    backend.quantize(x, None, parse(fmt), rowwise, columnwise, layout, amax, rng, out)


def _quantize_grouped_out(
    x: Tensor,
    offsets: Tensor,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
    out: list[Tensor],
) -> None:
    *planes, kept_offsets = out
    backend.quantize(x, offsets, parse(fmt), rowwise, columnwise, layout, amax, rng, planes)
    kept_offsets.copy_(offsets)


def _quantize_scaled(
    x: Tensor, offsets: Tensor | None, fmt: str, rowwise: bool, columnwise: bool, layout: str, scale: Tensor
) -> list[Tensor]:
    return backend.quantize(x, offsets, parse(fmt), rowwise, columnwise, layout, None, None, scale=scale)


def _quantize_scaled_fake(
    x: Tensor, offsets: Tensor | None, fmt: str, rowwise: bool, columnwise: bool, layout: str, scale: Tensor
) -> list[Tensor]:
    if offsets is None:
        return _quantize_fake(x, fmt, rowwise, columnwise, layout, None, None)
    return _quantize_grouped_fake(x, offsets, fmt, rowwise, columnwise, layout, None, None)


def _fake_plane(x: Tensor, fmt: Format, data: tuple[int, ...], scale: tuple[int, ...], amax: tuple[int, ...]) -> list[Tensor]:
    shapes = ((data, torch.uint8), (scale, scale_dtype(fmt)), (amax, torch.float32))
    return [x.new_empty(shape, dtype=dtype) for shape, dtype in shapes]


def _asked(rowwise: bool, columnwise: bool) -> list[str]:
    return [name for name, asked in (("rowwise", rowwise), ("columnwise", columnwise)) if asked]


def _quantize_fake(
    x: Tensor, fmt: str, rowwise: bool, columnwise: bool, layout: str, amax: Tensor | None, rng: Tensor | None
) -> list[Tensor]:
    f, (M, K) = parse(fmt), x.shape
    result: list[Tensor] = []
    for p in _asked(rowwise, columnwise):
        own = f.of(p)
        result += _fake_plane(x, own, *plane_shapes(own, M, K, p, layout), amax_shape(own, p, M, K, None))
    return result


def _quantize_grouped_fake(
    x: Tensor,
    offsets: Tensor,
    fmt: str,
    rowwise: bool,
    columnwise: bool,
    layout: str,
    amax: Tensor | None,
    rng: Tensor | None,
) -> list[Tensor]:
    return fake_grouped(x, x.shape[0], x.shape[1], offsets.shape[0] - 1, parse(fmt), rowwise, columnwise, layout)


def fake_grouped(
    x: Tensor, capacity: int, K: int, G: int, fmt: Format, rowwise: bool, columnwise: bool, layout: str
) -> list[Tensor]:
    """Empty planes of a grouped tensor, in the operators' order."""
    result: list[Tensor] = []
    for p in _asked(rowwise, columnwise):
        own = fmt.of(p)
        shapes = grouped_plane_shapes(own, capacity, K, G, p, layout)
        result += _fake_plane(x, own, *shapes, amax_shape(own, p, capacity, K, G))
    return result


_PLAIN = "Tensor x, str fmt, bool rowwise, bool columnwise, str layout, Tensor? amax, Tensor? rng"
_GROUPED = _PLAIN.replace("Tensor x,", "Tensor x, Tensor offsets,")
registry.define(f"quantize({_PLAIN}) -> Tensor[]", _quantize, _quantize_fake)
registry.define(f"quantize_grouped({_GROUPED}) -> Tensor[]", _quantize_grouped, _quantize_grouped_fake)
registry.define(f"quantize_out({_PLAIN}, Tensor(a!)[] out) -> ()", _quantize_out, lambda *args: None)
registry.define(f"quantize_grouped_out({_GROUPED}, Tensor(a!)[] out) -> ()", _quantize_grouped_out, lambda *args: None)
registry.define(
    "quantize_scaled(Tensor x, Tensor? offsets, str fmt, bool rowwise, bool columnwise, str layout, Tensor scale) -> Tensor[]",
    _quantize_scaled,
    _quantize_scaled_fake,
)
