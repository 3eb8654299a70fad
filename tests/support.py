"""What these tests share: the one measure of difference, decoding by tables in float64, problems, poison.

Legend: M rows, K inputs, N outputs, G groups, H hidden, I intermediate. Nothing here calls the package's own decoding.
"""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from oracle import formats as oracle_formats
from oracle import grouped as oracle_grouped
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


def _elements(data: Tensor, fmt: bs.formats.Format) -> Tensor:
    if isinstance(fmt, bs.NVFP4):
        return E2M1[torch.stack((data & 15, data >> 4), -1).flatten(-2).int()]
    return (E4M3 if fmt.element == "e4m3" else E5M2)[data.int()]


def operand64(q: bs.GroupedTensor, which: str) -> list[Tensor]:
    """float64 (m_g, K) of each group, decoded by address from the plane's own bytes, the global scale included.

    The columnwise plane of a Hadamard format comes transformed, in whole blocks of 16 rows.
    """
    plane, fmt, K = getattr(q, which), q.format, q.shape[1]
    offsets, first_tile, result = q.offsets.tolist(), 0, []
    for g, (start, end) in enumerate(pairwise(offsets)):
        m = end - start
        tiles = -(-m // 128)
        args = (plane, fmt, q.shape[1], start, m, first_tile, tiles)
        x = _row_group(*args) if which == "rowwise" else _column_group(*args)
        if isinstance(fmt, bs.NVFP4):
            encode = 2688 / float(plane.amax[g]) if plane.amax[g] else 1.0
            x = x / encode
        if isinstance(fmt, bs.FP8Tensor):
            x = x * plane.scale[g].double()
        assert x.shape[1] == K
        result.append(x)
        first_tile += tiles
    return result


def _row_group(plane: bs.Plane, fmt: bs.formats.Format, K: int, start: int, m: int, T: int, t: int) -> Tensor:
    x = _elements(plane.data[start : start + m], fmt)[:, :K]
    if isinstance(fmt, bs.FP8Tensor):
        return x
    column = torch.arange(K) // fmt.block[1]
    if isinstance(fmt, bs.FP8Block):
        row = T + torch.arange(m) // 128 if fmt.is_2d else start + torch.arange(m)
        return x * plane.scale[row].double()[:, column]
    blocks = -(-K // fmt.block[1])
    nT = -(-blocks // 4)
    i, j = torch.arange(m)[:, None], torch.arange(blocks)[None]
    if plane.layout == "compact":
        codes = plane.scale[128 * T + i, j]
    else:
        codes = plane.scale[512 * nT * T + swizzled_offset(i, j, nT)]
    return x * (E8M0 if isinstance(fmt, bs.MXFP8) else E4M3)[codes.int()][:, column]


def _column_group(plane: bs.Plane, fmt: bs.formats.Format, K: int, start: int, m: int, T: int, t: int) -> Tensor:
    Kt, k = -(-K // 128), torch.arange(K)[:, None]
    if isinstance(fmt, bs.MXFP8):
        x = _elements(plane.data[start : start + m], fmt)
        b = torch.arange(-(-m // 32))[None]
        compact = plane.layout == "compact"
        codes = plane.scale[4 * T + b, k] if compact else plane.scale[512 * Kt * T + swizzled_offset(k, b, t)]
        return x * E8M0[codes.int()].mT[torch.arange(m) // 32]
    if isinstance(fmt, bs.NVFP4):
        blocks = -(-m // 16)
        data = plane.data[64 * K * T + 64 * t * k + torch.arange(8 * blocks)[None]]
        x, b = _elements(data, fmt), torch.arange(blocks)[None]
        compact = plane.layout == "compact"
        codes = plane.scale[1024 * Kt * T + (8 * t * k + b if compact else swizzled_offset(k, b, 2 * t))]
        x = x * E4M3[codes.int()].repeat_interleave(16, 1)
        return x.mT if fmt.hadamard else x.mT[:m]
    x = _elements(plane.data[128 * K * T + 128 * t * k + torch.arange(m)[None]], fmt).mT
    if isinstance(fmt, bs.FP8Tensor):
        return x
    scale = plane.scale[T + torch.arange(m) // 128].double()
    return x * (scale[:, torch.arange(K) // 128] if fmt.is_2d else scale)


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


def slots(fmt: bs.formats.Format) -> oracle_formats.Format:
    """The oracle's name of a format (plain rounding: only addresses are taken from it)."""
    options = {"block": fmt.block} if hasattr(fmt, "block") else {}
    return oracle_formats.Format(type(fmt).__name__, options)


def poison(q: bs.GroupedTensor, byte: int) -> int:
    """Overwrite every byte of q that belongs to no live row: data, absent nibbles, scales. Returns how many entries."""
    count = 0
    layout = next(iter(q.planes.values())).layout
    marks = oracle_grouped.live(q.offsets.numpy(), q.capacity, q.shape[1], slots(q.format), layout)
    for which, plane in q.planes.items():
        for tensor, live in ((plane.data, marks[which].data), (plane.scale, marks[which].scale)):
            dead = ~torch.from_numpy(live)
            tensor[dead] = math.nan if tensor.dtype == torch.float32 else byte
            count += int(dead.sum())
        if isinstance(q.format, bs.NVFP4):
            count += _poison_nibbles(q, which, byte)
    return count


def _poison_nibbles(q: bs.GroupedTensor, which: str, byte: int) -> int:
    """The absent elements of partial NVFP4 blocks (a transform block keeps all of its elements)."""
    data, K, high = getattr(q, which).data, q.shape[1], byte & 0xF0
    if which == "rowwise":
        live = slice(0, int(q.offsets[-1]))
        if K % 2:
            data[live, K // 2] = (data[live, K // 2] & 15) | high
        data[live, -(-K // 2) :] = byte
        return data[live, K // 2 :].numel()
    if q.format.hadamard:
        return 0
    first_tile, count = 0, 0
    for m in q.offsets.diff().tolist():
        tiles = -(-m // 128)
        rows = data[64 * K * first_tile : 64 * K * (first_tile + tiles)].view(K, 64 * tiles)
        if m % 2:
            rows[:, m // 2] = (rows[:, m // 2] & 15) | high
        rows[:, -(-m // 2) :] = byte
        first_tile, count = first_tile + tiles, count + rows[:, m // 2 :].numel()
    return count
