"""NVFP4 four over six, written block by block in plain loops over the 16 elements (of all blocks at once)."""

import numpy as np

from . import codes
from .blocks import Plane, amax, over_tiles, row_blocks, tiles

F32 = np.float32
V = 16


def s_enc(amax_g: np.ndarray, E: int) -> np.ndarray:
    """min(fl(6E/amax_g), FLT_MAX); 1 where amax_g is 0 or infinite."""
    with np.errstate(all="ignore"):
        s = np.minimum(F32(6 * E) / amax_g, codes.FLT_MAX).astype(F32)
    return np.where((amax_g == 0) | (s == 0), F32(1), s).astype(F32)


def two_scales(amax_b: np.ndarray, amax_g: np.ndarray, E: int) -> tuple[np.ndarray, np.ndarray]:
    """E4M3 codes (s6, s4)."""
    with np.errstate(all="ignore"):
        base = (amax_b / F32(6)).astype(F32) * s_enc(amax_g, E)
        return codes.encode(base, "e4m3"), codes.encode(F32(1.5) * base, "e4m3")


def element_codes(cut: np.ndarray, s: np.ndarray, amax_g: np.ndarray, E: int) -> np.ndarray:
    """E2M1 codes of (R, blocks, 16) under scale codes (R, blocks)."""
    with np.errstate(all="ignore"):
        s_dec = F32(1) / s_enc(amax_g, E)
        enc = np.minimum(F32(1) / (codes.decode(s, "e4m3") * s_dec), codes.FLT_MAX)
        return codes.encode(cut * enc[..., None], "e2m1")


def block_errors(cut: np.ndarray, s: np.ndarray, amax_g: np.ndarray, E: int, measure: str) -> np.ndarray:
    """float32 (R, blocks): the error of each block, added element by element."""
    q = codes.decode(element_codes(cut, s, amax_g, E), "e2m1")
    factor, total = codes.decode(s, "e4m3"), np.zeros(s.shape, dtype=F32)
    with np.errstate(all="ignore"):
        for t in range(V):
            back = ((q[..., t] * factor) * amax_g) / F32(6 * E)
            d = back - cut[..., t]
            total = total + (np.abs(d) if measure == "mae" else d * d)
    return total


def keep_four(cut: np.ndarray, s6: np.ndarray, s4: np.ndarray, amax_g: np.ndarray, E: int, measure: str) -> np.ndarray:
    """bool (R, blocks): err4 < err6."""
    return block_errors(cut, s4, amax_g, E, measure) < block_errors(cut, s6, amax_g, E, measure)


def keep_four_of_tiles(x: np.ndarray, amax_g: np.ndarray, E: int, measure: str) -> np.ndarray:
    """bool (tile rows, tile columns), from the rows of x: 16 row errors of a tile added as r, r+8; then +4, +2, +1."""
    square = amax(tiles(x, V), -1)
    down, across = square.shape
    padded = np.zeros((down * V, x.shape[1]), dtype=F32)
    padded[: x.shape[0]] = x
    cut, error = row_blocks(padded, V), {}
    for name, s in zip((6, 4), two_scales(over_tiles(square, V, down * V), amax_g, E), strict=True):
        rows = block_errors(cut, s, amax_g, E, measure).reshape(down, V, across)
        with np.errstate(all="ignore"):
            for h in (8, 4, 2, 1):
                rows = np.stack([rows[:, r] + rows[:, r + h] for r in range(h)], axis=1)
        error[name] = rows[:, 0]
    return error[4] < error[6]


def quantize(x: np.ndarray, block: tuple, measure: str, E: int, nan: str, row_scaled: bool, given) -> dict[str, Plane]:
    """Both planes of x (M, K); for 16x16 blocks the choice is made once, from the row plane with its amax."""
    result, chosen = {}, None
    for number, (name, stored) in enumerate((("rowwise", x), ("columnwise", np.ascontiguousarray(x.T)))):
        rows, width = stored.shape
        cut = row_blocks(stored, V)
        if given is not None and given[number] is not None:
            kept = np.asarray(given[number], dtype=F32).reshape(-1)
        else:
            kept = amax(cut, (1, 2)) if row_scaled else np.array([amax(cut)], dtype=F32)
        amax_g = kept[:, None]
        if block == (1, 16):
            s6, s4 = two_scales(amax(cut, -1), amax_g, E)
            s = np.where(keep_four(cut, s6, s4, amax_g, E, measure), s4, s6)
            has_nan = np.isnan(cut).any(-1)
        else:
            square = tiles(stored, V)
            if number == 0:
                chosen = keep_four_of_tiles(x, amax_g, E, measure)
            s6, s4 = two_scales(amax(square, -1), amax_g, E)
            s = over_tiles(np.where(chosen if number == 0 else chosen.T, s4, s6), V, rows)
            has_nan = over_tiles(np.isnan(square).any(-1), V, rows)
        s = np.where(has_nan & (nan == "propagate"), np.uint8(0x7F), s).astype(np.uint8)
        q = np.where((s == 0x7F)[..., None], np.uint8(7), element_codes(cut, s, amax_g, E)).reshape(rows, cut.shape[1] * V)
        q[:, width:] = 0
        result[name] = Plane(codes.pack_e2m1(q), s, kept)
    return result
