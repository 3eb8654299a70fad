"""Inputs that hurt: wide dynamic range, planted specials, awkward strides. Deterministic by seed."""

import numpy as np
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
KINDS = ("normal", "wide", "extreme", "special", "tiny", "blocks")
STRIDES = ("contiguous", "transposed", "sliced", "step")
ROWS = (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257)


def values(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """float32 (rows, columns).

    normal   N(0, 1), every 17th value 0 or -0
    wide     exponents that differ by row, column and element, within +-40
    extreme  every finite float32 bit pattern is as likely as another
    special  wide, with NaN and infinities in some blocks, largest floats and subnormals in others
    tiny     subnormals and the smallest normals
    blocks   whole 32x32 tiles of zeros, of one value, of powers of two and of largest floats
    """
    rng = np.random.default_rng(seed)
    shape = (rows, columns)
    if kind == "normal":
        x = rng.standard_normal(shape).astype(np.float32)
        flat = x.reshape(-1)
        flat[5::34], flat[22::34] = 0.0, -0.0
        return x
    if kind == "extreme":
        pattern = rng.integers(0, 2**32, shape, dtype=np.uint32)
        pattern = np.where((pattern & 0x7F800000) == 0x7F800000, pattern & 0x807FFFFF, pattern).astype(np.uint32)
        return pattern.view(np.float32)
    if kind == "tiny":
        pattern = rng.integers(0, 0x02000000, shape, dtype=np.uint32) >> rng.integers(0, 24, shape, dtype=np.uint32)
        return (pattern | (rng.integers(0, 2, shape, dtype=np.uint32) << 31)).astype(np.uint32).view(np.float32)
    exponent = rng.integers(-18, 19, (rows, 1)) + rng.integers(-12, 13, (1, columns)) + rng.integers(-10, 11, shape)
    x = np.ldexp(rng.standard_normal(shape).astype(np.float32), exponent).astype(np.float32)
    if kind == "special":
        return _plant(x, rng)
    if kind == "blocks":
        return _tiles(x, rng)
    assert kind == "wide"
    return x


def _plant(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    largest = np.finfo(np.float32).max
    special = np.array([np.nan, np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -1e-39, largest, -largest])
    count = max(1, x.size // 300)
    which = rng.integers(0, len(special), count)
    if rng.integers(0, 2):
        which %= 3
    x.reshape(-1)[rng.integers(0, x.size, count)] = special[which].astype(np.float32)
    return x


def _tiles(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    largest = np.finfo(np.float32).max
    for top in range(0, x.shape[0], 32):
        for left in range(0, x.shape[1], 32):
            tile = x[top : top + 32, left : left + 32]
            choice = rng.integers(0, 8)
            if choice == 0:
                tile[:] = 0.0
            elif choice == 1:
                tile[:] = -0.0
            elif choice == 2:
                tile[:] = np.ldexp(1.0, int(rng.integers(-149, 128)))
            elif choice == 3:
                tile[:] = np.ldexp(np.sign(tile), rng.integers(-149, 128, tile.shape))
            elif choice == 4:
                tile[:] = np.copysign(largest, tile)
            elif choice == 5:
                tile[:, 1:] = 0.0
    return x


def tensor(kind: str, rows: int, columns: int, seed: int, dtype: str = "float32", stride: str = "contiguous"):
    """(torch tensor of `dtype` with the asked strides, the same values in float32 numpy)."""
    x = torch.from_numpy(values(kind, rows, columns, seed)).to(DTYPES[dtype])
    exact = x.float().numpy().copy()
    if stride == "transposed":
        x = x.t().contiguous().t()
    elif stride == "sliced":
        wide = torch.full((rows + 3, columns + 7), float("nan"), dtype=x.dtype)
        wide[1 : rows + 1, 3 : columns + 3] = x
        x = wide[1 : rows + 1, 3 : columns + 3]
    elif stride == "step":
        wide = torch.full((2 * rows, 2 * columns), float("nan"), dtype=x.dtype)
        wide[::2, 1::2] = x
        x = wide[::2, 1::2]
    return x, exact


def offsets(groups: int, live: int, seed: int) -> np.ndarray:
    """int64 [groups + 1] from 0 to live: random sizes, many of them empty."""
    rng = np.random.default_rng(seed)
    if groups == 0:
        return np.zeros(1, dtype=np.int64)
    cuts = rng.integers(0, live + 1, groups - 1)
    repeated = rng.integers(0, 4, groups - 1) == 0
    if groups > 1:
        cuts = np.where(repeated, cuts[0], cuts)
    return np.concatenate([[0], np.sort(cuts), [live]]).astype(np.int64)
