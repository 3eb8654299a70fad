"""What these tests share: the one measure of difference, decoding by tables in float64, problems, poison.

Legend: M rows, K inputs, N outputs, G groups, H hidden, I intermediate. Nothing here calls the package's own decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

import blockscale as bs
from blockscale import recipes

#: bound of one GEMM and of a sum of rows, float32 against float64
GEMM_BOUND = 2e-6
#: bound of an activation and its gradients
ACTIVATION_BOUND = 1e-6

RECIPES = {
    "bf16": recipes.BF16(),
    "mxfp8": recipes.MXFP8Training(),
    "mxfp8_hybrid": recipes.MXFP8Training("e5m2"),
    "mxfp8_square": recipes.MXFP8Training(weight_block=(32, 32), scale_rounding="floor"),
    "nvfp4": recipes.NVFP4Training(),
    "nvfp4_plain": recipes.NVFP4Training(hadamard=False, stochastic=False),
    "fp8_current": recipes.FP8CurrentTraining(),
    "fp8_block": recipes.FP8BlockTraining(),
}
#: recipes whose bits do not depend on the index of a group
ROUNDED = {name: r for name, r in RECIPES.items() if not r.needs_rng} | {"nvfp4_hadamard": recipes.NVFP4Training(stochastic=False)}
MX8, MX4, NV4 = bs.MXFP8(), bs.MXFP4(), bs.NVFP4()


def _custom(role: str, linear: str) -> bs.formats.Format | None:
    """Another format for every pair of role and linear."""
    return {
        ("input", "fc1"): bs.Hybrid(MX8, bs.NVFP4(hadamard=True)),
        ("weight", "fc1"): bs.FP8Block(block=(128, 128)),
        ("gradient", "fc1"): bs.NVFP4(hadamard=True, stochastic=True),
        ("input", "fc2"): None,
        ("weight", "fc2"): MX4,
        ("gradient", "fc2"): bs.FP8Tensor("e5m2"),
        ("input", "linear"): bs.FP8Tensor(),
        ("weight", "linear"): bs.NVFP4((16, 16), four_over_six="mse"),
        ("gradient", "linear"): None,
    }[role, linear]


#: recipes beyond those of the first version
LATER_RECIPES = {
    "mxfp4": recipes.Recipe(MX4, bs.MXFP4((32, 32)), MX4),
    "mxfp4_training": recipes.MXFP4Training((1, 32)),
    "nvfp4_rows": recipes.Recipe(bs.NVFP4(row_scaled=True), bs.NVFP4((16, 16), four_over_six="mse"), bs.NVFP4(row_scaled=True)),
    "nvfp4_rows_training": recipes.NVFP4Training(row_scaled=True, four_over_six="mae"),
    "nvfp4_forward": recipes.NVFP4ForwardTraining("e5m2"),
    "w4a8": recipes.W4A8Training(),
    "w4a8_nvfp4": recipes.W4A8Training(bs.NVFP4((16, 16)), "e5m2"),
    "custom": recipes.CustomTraining(_custom),
    "planes": recipes.Recipe(bs.Hybrid(MX8, NV4), bs.Hybrid(NV4, MX8), bs.Hybrid(bs.MXFP8("e5m2"), bs.FP8Block())),
    "from_row": recipes.Recipe(*(bs.MXFP8(columnwise_source="rowwise_dequantized"),) * 3),
    "high_precision": recipes.MXFP8Training().with_backward("high_precision"),
    "dequantized": recipes.MXFP8Training().with_backward("dequantized"),
    "dequantized_nvfp4": recipes.NVFP4Training().with_backward("dequantized"),
    "delayed": recipes.FP8DelayedTraining(history=3),
    "delayed_dequantized": recipes.FP8DelayedTraining(history=3, algorithm="most_recent").with_backward("dequantized"),
    "delayed_weight": recipes.Recipe(MX8, bs.FP8Delayed(history=2, margin=1), bs.MXFP8("e5m2")),
    "weight_only": recipes.Recipe(None, MX4, None, "dequantized"),
}
ACTIVATIONS = ("swiglu", "clamped_swiglu", "squared_relu", "situ")


# the measure


def calc_diff(got: Tensor, expected: Tensor) -> float:
    """Relative Frobenius distance ||got - expected|| / ||expected||; inf for a NaN, an infinity or anything beside zeros."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    got, expected = got.detach().double(), expected.detach().double()
    distance, size = float((got - expected).norm()), float(expected.norm())
    if not math.isfinite(distance):
        return math.inf
    if size == 0:
        return 0.0 if distance == 0 else math.inf
    return distance / size


def worst_group(got: Tensor, expected: Tensor, offsets: Tensor | None = None) -> float:
    """The largest calc_diff over the groups: of rows given by offsets, else of the first dimension."""
    assert got.shape == expected.shape, f"shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    if offsets is None:
        pairs = zip(got, expected, strict=True)
    else:
        pairs = [(got[a:b], expected[a:b]) for a, b in pairwise([*offsets.tolist(), got.shape[0]])]
    return max((calc_diff(a, b) for a, b in pairs), default=0.0)


def bits(x: Tensor) -> Tensor:
    """The bits of a tensor, NaNs made one (zeros keep their sign)."""
    x = x.detach().contiguous()
    if not x.is_floating_point():
        return x
    kind = {4: torch.int32, 2: torch.int16}[x.element_size()]
    return torch.where(x.isnan(), torch.full_like(x, torch.nan), x).view(kind)


def assert_same(got: Tensor | None, expected: Tensor | None, what: object = "") -> None:
    """Same dtype, shape and bits."""
    if expected is None or got is None:
        assert got is expected, f"{what}: got {got}, expected {expected}"
        return
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    wrong = bits(got) != bits(expected)
    if wrong.any():
        where = tuple(int(i) for i in wrong.nonzero()[0])
        found = f"first at {where}: got {got[where].item()!r}, expected {expected[where].item()!r}"
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.numel()} differ, {found}")


def assert_all_same(got: dict[str, Tensor | None], expected: dict[str, Tensor | None], what: object = "") -> None:
    """assert_same for every entry of two dictionaries with the same keys."""
    assert got.keys() == expected.keys()
    for name in expected:
        assert_same(got[name], expected[name], f"{what} {name}")


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    """torch's number of threads inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# codes, from their definition


def float8_table(exponent_bits: int, mantissa_bits: int, infinities: bool) -> Tensor:
    """float64 values of the 256 codes of E4M3 (fn, no infinity) or E5M2."""
    bias, top = 2 ** (exponent_bits - 1) - 1, 2**exponent_bits - 1
    values = []
    for code in range(256):
        exponent, mantissa = (code & 0x7F) >> mantissa_bits, code & (2**mantissa_bits - 1)
        fraction = mantissa / 2**mantissa_bits
        value = math.ldexp(1 + fraction, exponent - bias) if exponent else math.ldexp(fraction, 1 - bias)
        if infinities and exponent == top:
            value = math.nan if mantissa else math.inf
        if not infinities and code & 0x7F == 0x7F:
            value = math.nan
        values.append(-value if code & 0x80 else value)
    return torch.tensor(values, dtype=torch.float64)


E4M3, E5M2 = float8_table(4, 3, False), float8_table(5, 2, True)
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
E8M0 = torch.tensor([*(math.ldexp(1, code - 127) for code in range(255)), math.nan], dtype=torch.float64)


def swizzled_offset(i: Tensor, j: Tensor, tiles: int) -> Tensor:
    """Byte of scale (i, j) in 128x4 tiles, ``tiles`` of them along j."""
    return ((i // 128) * tiles + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4


@dataclass(frozen=True)
class Span:
    """One group: first row, rows, tiles of 128 rows before it, its own tiles."""

    start: int
    rows: int
    before: int
    tiles: int


def spans(q: bs.GroupedTensor) -> list[Span]:
    """Where the groups of q lie."""
    result, before = [], 0
    for start, end in pairwise(q.offsets.tolist()):
        tiles = -(-(end - start) // 128)
        result.append(Span(start, end - start, before, tiles))
        before += tiles
    return result


def data_addresses(q: bs.GroupedTensor, which: str, s: Span) -> Tensor:
    """Flat bytes of a group: rowwise (rows, bytes of a row), columnwise (K, bytes of a column)."""
    fp4, K = q.format.packed, q.shape[1]
    v = q.format.block_length
    if which == "rowwise":
        width = v // 2 * -(-K // v) if fp4 else K
        return (s.start + torch.arange(s.rows))[:, None] * width + torch.arange(width)
    k = torch.arange(K)[:, None]
    if isinstance(q.format, bs.MXFP8):
        return (s.start + torch.arange(s.rows)) * K + k
    pitch, used = (64, v // 2 * -(-s.rows // v)) if fp4 else (128, s.rows)
    return pitch * K * s.before + pitch * s.tiles * k + torch.arange(used)


def scale_addresses(q: bs.GroupedTensor, which: str, s: Span) -> Tensor:
    """Flat entries of a group's scales: rowwise (rows, blocks along K), columnwise (columns, blocks along M).

    128x128 blocks have one entry per 128 rows (columns). A format with one scale a group has none here.
    """
    fmt, K, layout = q.format, q.shape[1], q.planes[which].layout
    Kt, v = -(-K // 128), fmt.block[1]
    if which == "rowwise":
        i, j = torch.arange(s.rows)[:, None], torch.arange(-(-K // v))
        if isinstance(fmt, bs.FP8Block):
            return (s.before + torch.arange(s.tiles)[:, None] if fmt.is_2d else s.start + i) * Kt + j
        nT = -(-len(j) // 4)
        return (128 * s.before + i) * 4 * nT + j if layout == "compact" else 512 * nT * s.before + swizzled_offset(i, j, nT)
    k, b = torch.arange(K)[:, None], torch.arange(-(-s.rows // v))
    if isinstance(fmt, bs.FP8Block):
        return (s.before + b) * Kt + torch.arange(Kt)[:, None] if fmt.is_2d else (s.before + b) * K + k
    if isinstance(fmt, bs.MXFP8):
        return (4 * s.before + b) * 128 * Kt + k if layout == "compact" else 512 * Kt * s.before + swizzled_offset(k, b, s.tiles)
    n = 128 // v
    inner = n * s.tiles * k + b if layout == "compact" else swizzled_offset(k, b, n // 4 * s.tiles)
    return 128 * n * Kt * s.before + inner


def operand64(q: bs.GroupedTensor, which: str) -> list[Tensor]:
    """float64 (rows, K) of each group, decoded by address from the plane's own bytes, the global scale included.

    The columnwise plane of a Hadamard format comes transformed, in whole blocks of 16 rows.
    """
    q = replace(q, format=q.format.stored(which))
    return [_decode(q, which, g, s) for g, s in enumerate(spans(q))]


def _decode(q: bs.GroupedTensor, which: str, g: int, s: Span) -> Tensor:
    plane, fmt = q.planes[which], q.format
    codes = plane.data.flatten()[data_addresses(q, which, s)]
    if fmt.packed:
        x = E2M1[torch.stack((codes & 15, codes >> 4), -1).flatten(-2).int()]
    else:
        x = (E4M3 if fmt.element == "e4m3" else E5M2)[codes.int()]
    keeps_block = which == "columnwise" and getattr(fmt, "hadamard", False)
    length = q.shape[1] if which == "rowwise" else x.shape[1] if keeps_block else s.rows
    x = x[:, :length]
    if isinstance(fmt, bs.FP8Tensor):
        x = x * plane.scale[g].double()
    else:
        scale = plane.scale.flatten()[scale_addresses(q, which, s)]
        scale = scale.double() if isinstance(fmt, bs.FP8Block) else (E4M3 if isinstance(fmt, bs.NVFP4) else E8M0)[scale.int()]
        if isinstance(fmt, bs.FP8Block) and fmt.is_2d:
            scale = scale.repeat_interleave(128, 0)[: x.shape[0]]
        x = x * scale.repeat_interleave(fmt.block[1], 1)[:, :length]
    if isinstance(fmt, bs.NVFP4):
        x = x * _global(q, which, g, s)
    return x if which == "rowwise" else x.mT


def _global(q: bs.GroupedTensor, which: str, g: int, s: Span) -> Tensor | float:
    """amax / 6E of a group, or of each row of its stored plane (rows, 1)."""
    amax = q.planes[which].amax
    if q.format.row_scaled:
        amax = amax[s.start : s.start + s.rows] if which == "rowwise" else amax[g]
        return torch.where(amax == 0, q.format.range, amax.double())[:, None] / q.format.range
    return float(amax[g]) / q.format.range if amax[g] else 1.0


def operand_list(x: bs.GroupedTensor | Tensor, which: str, offsets: Tensor) -> list[Tensor]:
    """operand64 of a quantized tensor; rows or weights rounded to bfloat16 of a plain one."""
    if isinstance(x, bs.GroupedTensor):
        return operand64(x, which)
    rounded = x.bfloat16().double()
    return list(rounded) if x.dim() == 3 else [rounded[a:b] for a, b in pairwise(offsets.tolist())]


def gemm64(a: bs.GroupedTensor | Tensor, b: bs.GroupedTensor | Tensor, role: str, offsets: Tensor, capacity: int) -> Tensor:
    """A role of the grouped GEMM in float64 on the operands as they are stored."""
    planes = {"forward": ("rowwise", "rowwise"), "dgrad": ("rowwise", "columnwise"), "wgrad": ("columnwise", "columnwise")}[role]
    pairs = zip(operand_list(a, planes[0], offsets), operand_list(b, planes[1], offsets), strict=True)
    if role == "wgrad":
        return torch.stack([p.mT @ q for p, q in pairs])
    blocks = [p @ (q.mT if role == "forward" else q) for p, q in pairs]
    blocks.append(torch.zeros(capacity - int(offsets[-1]), blocks[0].shape[1], dtype=torch.float64))
    return torch.cat(blocks)


# problems


def seeded(seed: int) -> torch.Generator:
    """A generator of its own."""
    return torch.Generator().manual_seed(seed)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float32, spread: float = 0.0) -> Tensor:
    """N(0, 1), times 2^(spread * N(0, 1)) a row, so that rows, blocks and groups differ in size."""
    x = torch.randn(*shape, generator=seeded(seed))
    if spread:
        x = x * torch.exp2(spread * torch.randn(*shape[:-1], 1, generator=seeded(seed + 1)))
    return x.to(dtype)


def offsets_of(sizes: list[int]) -> Tensor:
    """int64[G+1], without the package."""
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)
    return torch.tensor(total)


def poison(q: bs.GroupedTensor, byte: int) -> int:
    """Overwrite every byte of q that belongs to no live element: dead rows, padding, absent nibbles. Returns how many."""
    count = 0
    for which, plane in q.planes.items():
        for tensor, addresses in ((plane.data, data_addresses), (plane.scale, scale_addresses)):
            if isinstance(q.format, bs.FP8Tensor) and tensor is plane.scale:
                continue
            dead = torch.ones(tensor.numel(), dtype=torch.bool)
            for span in spans(q):
                dead[addresses(q, which, span).flatten()] = False
            tensor.view(-1)[dead] = math.nan if tensor.dtype == torch.float32 else byte
            count += int(dead.sum())
        if q.format.packed and not (getattr(q.format, "hadamard", False) and which == "columnwise"):
            count += _poison_nibbles(q, which, byte)
    return count


def _poison_nibbles(q: bs.GroupedTensor, which: str, byte: int) -> int:
    """The absent elements of partial E2M1 blocks (a transform block keeps all of its elements)."""
    flat, count = q.planes[which].data.view(-1), 0
    for span in spans(q):
        length = q.shape[1] if which == "rowwise" else span.rows
        where = data_addresses(q, which, span)
        if length % 2:
            half = where[:, length // 2]
            flat[half] = (flat[half] & 15) | (byte & 0xF0)
        flat[where[:, -(-length // 2) :].flatten()] = byte
        count += where[:, length // 2 :].numel()
    return count
