"""The operators ``grouped_gemm`` and ``grouped_gemm_wgrad_out`` and the public :func:`grouped_gemm`.

Legend: G groups, M rows (capacity), N outputs, K inputs of the linear layer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from blockscale.formats import parse
from blockscale.ops import backend, checks, registry
from blockscale.tensors import GroupedTensor, Plane

ROLES = ("forward", "dgrad", "wgrad")
#: which plane of (a, b) each role reads
PLANES = {"forward": ("rowwise", "rowwise"), "dgrad": ("rowwise", "columnwise"), "wgrad": ("columnwise", "columnwise")}
Operand = GroupedTensor | Tensor


def grouped_gemm(
    a: Operand,
    b: Operand,
    *,
    role: str = "forward",
    offsets: Tensor | None = None,
    bias: Tensor | None = None,
    bias_scale: Tensor | None = None,
    out: Tensor | None = None,
    accumulate: bool = False,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """One matrix product a group, in one of the three roles of a linear layer y = x W^T.

    ======= ===================================== ==================================== ==============
    role    a                                     b                                    result
    ======= ===================================== ==================================== ==============
    forward x (M, K), rowwise plane               W (G, N, K), rowwise plane           y (M, N)
    dgrad   dy (M, N), rowwise plane              W (G, N, K), columnwise plane        dx (M, K)
    wgrad   dy (M, N), columnwise plane           x (M, K), columnwise plane           dW (G, N, K)
    ======= ===================================== ==================================== ==============

    Args:
        a, b: GroupedTensor, or a high-precision tensor whose values are rounded to bfloat16. A quantized W is
            ``quantize_grouped(w_GNK, None, fmt, ...)``.
        offsets: int64[G+1]; None: those of the first quantized activation among a (and b in wgrad).
        bias: (G, N), forward only: added in float32 before the rounding, times ``bias_scale`` float32 (M,) if given.
        out: float32 (G, N, K) for wgrad: written, or added to with ``accumulate=True``. Empty groups write zeros.
        out_dtype: float32 (default for quantized operands), bfloat16 or float16; default for a tensor ``a``: its dtype.
            wgrad is float32 always.

    Returns:
        The product, accumulated in float32, times alpha = fl(global scale of a * that of b) where formats have one,
        rounded once; dead rows zero. ``out`` when given.

    Raises:
        TypeError, ValueError: naming the argument, its value and what is legal.
    """
    if role not in ROLES:
        raise ValueError(f"role={role!r} is not one of {ROLES}")
    offsets = _the_offsets(a, b, role, offsets)
    G = offsets.shape[0] - 1
    capacity, a_columns = _rows_shape("a", a)
    if role == "wgrad":
        b_rows, b_columns = _rows_shape("b", b)
        if b_rows != capacity:
            raise ValueError(f"b has {b_rows} rows but a has {capacity}; wgrad contracts over the same rows")
        _check_transform(a, b)
    else:
        n, k = _weight_shape(b, G)
        expected = k if role == "forward" else n
        if a_columns != expected:
            raise ValueError(f"a has {a_columns} columns; {role} with b of {n} x {k} a group needs {expected}")
        if role == "dgrad" and isinstance(b, GroupedTensor) and _transformed(b):
            raise ValueError("hadamard is True for b; the columnwise plane of a transformed weight is of no use in dgrad")
    checks.same_device(offsets=offsets, a=_some_tensor(a), b=_some_tensor(b), bias=bias, bias_scale=bias_scale, out=out)
    operands = [*_pack("a", a, PLANES[role][0]), *_pack("b", b, PLANES[role][1])]
    if bias_scale is not None and bias is None:
        raise ValueError(f"bias_scale is given but bias is None; it multiplies the bias (role={role!r})")
    if role == "wgrad":
        return _wgrad(operands, offsets, capacity, (G, a_columns, b_columns), out, accumulate, bias, out_dtype)
    if out is not None or accumulate:
        raise ValueError(f"out and accumulate are for role='wgrad'; role={role!r} returns a new tensor")
    if bias is not None:
        if role != "forward":
            raise ValueError(f"bias is for role='forward', not {role!r}")
        checks.shape("bias", checks.dtype("bias", bias, checks.FLOATS), (G, n), "one row a group")
        if bias_scale is not None:
            checks.shape("bias_scale", checks.dtype("bias_scale", bias_scale, (torch.float32,)), (capacity,), "one a row")
    if out_dtype is None:
        out_dtype = torch.float32 if isinstance(a, GroupedTensor) else a.dtype
    if out_dtype not in checks.FLOATS:
        raise TypeError(f"out_dtype={out_dtype}; legal: {checks.names(checks.FLOATS)}")
    result: Tensor = torch.ops.blockscale.grouped_gemm(*operands, offsets, role, capacity, n, k, bias, bias_scale, out_dtype)
    return result


def _wgrad(
    operands: Sequence[object],
    offsets: Tensor,
    capacity: int,
    shape: tuple[int, int, int],
    out: Tensor | None,
    accumulate: bool,
    bias: Tensor | None,
    out_dtype: torch.dtype | None,
) -> Tensor:
    if bias is not None:
        raise ValueError("bias is for role='forward', not 'wgrad'")
    if out_dtype not in (None, torch.float32):
        raise TypeError(f"out_dtype={out_dtype}; wgrad is torch.float32")
    if out is None:
        if accumulate:
            raise ValueError("accumulate=True needs out, the float32 buffer to add to")
        out = torch.empty(shape, dtype=torch.float32, device=offsets.device)
    checks.shape("out", checks.dtype("out", out, (torch.float32,)), shape, "(G, N, K)")
    torch.ops.blockscale.grouped_gemm_wgrad_out(*operands, offsets, capacity, shape[1], shape[2], out, accumulate)
    return out


def _the_offsets(a: Operand, b: Operand, role: str, offsets: Tensor | None) -> Tensor:
    """The one extent of the product; operands that carry one must carry the same."""
    rows = {"a": a, "b": b} if role == "wgrad" else {"a": a}
    carried = {name: t.offsets for name, t in rows.items() if isinstance(t, GroupedTensor)}
    if offsets is not None:
        carried = {"offsets": checks.offsets(offsets)} | carried
    if not carried:
        raise ValueError("offsets is None and no quantized activation carries them; int64[G+1] is needed")
    (name, the), *others = carried.items()
    for other, t in others:
        if t.shape != the.shape or not _same_values(t, the):
            raise ValueError(f"the offsets of {other} are not those of {name}; producer and consumer must share one extent")
    return the


def _same_values(x: Tensor, y: Tensor) -> bool:
    """Whether two offsets are one object, or, on the CPU, equal. Values on a GPU are not read."""
    if x is y or torch.compiler.is_compiling():
        return True
    return torch.equal(x, y) if x.device.type == "cpu" and y.device.type == "cpu" else x.data_ptr() == y.data_ptr()


def _rows_shape(name: str, x: Operand) -> tuple[int, int]:
    if isinstance(x, GroupedTensor):
        return x.shape
    t = checks.matrix(name, x, "capacity")
    return t.shape[0], t.shape[1]


def _weight_shape(w: Operand, G: int) -> tuple[int, int]:
    if isinstance(w, GroupedTensor):
        if w.num_groups != G or w.matrix_rows is None:
            kind = "no weights (G, N, K)" if w.matrix_rows is None else f"{w.num_groups} matrices"
            raise ValueError(f"b was quantized from {kind}; quantize_grouped(w_GNK, None, fmt) of {G} groups is needed")
        return w.matrix_rows, w.shape[1]
    checks.dtype("b", w, checks.FLOATS)
    if w.dim() != 3 or w.shape[0] != G:
        raise ValueError(f"b has shape {tuple(w.shape)}; ({G}, N, K) weights are needed")
    return w.shape[1], w.shape[2]


def _transformed(x: GroupedTensor) -> bool:
    return bool(getattr(x.format.of("columnwise"), "hadamard", False))


def _check_transform(a: Operand, b: Operand) -> None:
    transformed = [isinstance(t, GroupedTensor) and _transformed(t) for t in (a, b)]
    if transformed[0] != transformed[1]:
        raise ValueError(f"hadamard is {transformed[0]} for a and {transformed[1]} for b; wgrad needs the same in both")


def _some_tensor(x: Operand) -> Tensor:
    return x.offsets if isinstance(x, GroupedTensor) else x


def _pack(name: str, x: Operand, plane: str) -> tuple[list[Tensor], str, str]:
    """(tensors, format, layout) as the operators take an operand; format "" means high precision."""
    if isinstance(x, Tensor):
        return [x], "", ""
    try:
        p = x.plane(plane)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    return p.tensors(), x.format.of(plane).spec(), p.layout


def _unpack(
    tensors: list[Tensor],
    spec: str,
    layout: str,
    plane: str,
    shape: tuple[int, int],
    offsets: Tensor,
    matrix_rows: int | None = None,
) -> Operand:
    if not spec:
        return tensors[0]
    fmt = parse(spec)
    p = Plane(tensors[0], tensors[1], tensors[2] if fmt.has_amax else None, layout)
    row, column = (p, None) if plane == "rowwise" else (None, p)
    return GroupedTensor(shape, fmt, row, column, offsets, matrix_rows)


def _gemm(
    a: list[Tensor],
    a_format: str,
    a_layout: str,
    b: list[Tensor],
    b_format: str,
    b_layout: str,
    offsets: Tensor,
    role: str,
    capacity: int,
    n: int,
    k: int,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    checks.offset_values(offsets, capacity)
    G = offsets.shape[0] - 1
    weight_offsets = torch.arange(G + 1, device=offsets.device) * n
    forward = role == "forward"
    rows = _unpack(a, a_format, a_layout, "rowwise", (capacity, k if forward else n), offsets)
    w = _unpack(b, b_format, b_layout, PLANES[role][1], (G * n, k), weight_offsets, n)
    return backend.rows_by_weight(
        rows, w, offsets, capacity, transpose=forward, out_dtype=out_dtype, bias=bias, bias_scale=bias_scale
    )


def _gemm_fake(
    a: list[Tensor],
    a_format: str,
    a_layout: str,
    b: list[Tensor],
    b_format: str,
    b_layout: str,
    offsets: Tensor,
    role: str,
    capacity: int,
    n: int,
    k: int,
    bias: Tensor | None,
    bias_scale: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    return offsets.new_empty((capacity, n if role == "forward" else k), dtype=out_dtype)


def _wgrad_out(
    a: list[Tensor],
    a_format: str,
    a_layout: str,
    b: list[Tensor],
    b_format: str,
    b_layout: str,
    offsets: Tensor,
    capacity: int,
    n: int,
    k: int,
    out: Tensor,
    accumulate: bool,
) -> None:
    checks.offset_values(offsets, capacity)
    dy = _unpack(a, a_format, a_layout, "columnwise", (capacity, n), offsets)
    x = _unpack(b, b_format, b_layout, "columnwise", (capacity, k), offsets)
    store(out, backend.wgrad(dy, x, offsets, capacity), accumulate)


def store(out: Tensor, dw: Tensor, accumulate: bool) -> None:
    """Write or add float32 ``dw`` into ``out``."""
    if accumulate:
        out.add_(dw)
    else:
        out.copy_(dw)


_OPERANDS = "Tensor[] a, str a_format, str a_layout, Tensor[] b, str b_format, str b_layout, Tensor offsets"
registry.define(
    f"grouped_gemm({_OPERANDS}, str role, int capacity, int n, int k, Tensor? bias, Tensor? bias_scale,"
    " ScalarType out_dtype) -> Tensor",
    _gemm,
    _gemm_fake,
)
registry.define(
    f"grouped_gemm_wgrad_out({_OPERANDS}, int capacity, int n, int k, Tensor(a!) out, bool accumulate) -> ()",
    _wgrad_out,
    lambda *args: None,
)
