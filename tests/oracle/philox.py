"""Philox4x32-10 and the 16 random bits that stochastic rounding gives to each element."""

import numpy as np

LOW = np.uint64(0xFFFFFFFF)
MULTIPLIERS = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
WEYL = 0x9E3779B9, 0xBB67AE85


def philox4x32(counter: tuple, key: tuple[int, int]) -> np.ndarray:
    """Ten rounds. counter: four integer arrays that broadcast; key: two integers. uint32 [..., 4]."""
    c0, c1, c2, c3 = (np.asarray(c, dtype=np.uint64) & LOW for c in np.broadcast_arrays(*counter))
    k0, k1 = key
    for _ in range(10):
        product0, product1 = MULTIPLIERS[0] * c0, MULTIPLIERS[1] * c2
        c0, c1, c2, c3 = (
            (product1 >> np.uint64(32)) ^ c1 ^ np.uint64(k0),
            product1 & LOW,
            (product0 >> np.uint64(32)) ^ c3 ^ np.uint64(k1),
            product0 & LOW,
        )
        k0, k1 = (k0 + WEYL[0]) & 0xFFFFFFFF, (k1 + WEYL[1]) & 0xFFFFFFFF
    return np.stack([c0, c1, c2, c3], axis=-1).astype(np.uint32)


def element_bits(words: np.ndarray) -> np.ndarray:
    """uint32 [..., 4] words of a block to its 16 elements' r: low 16 bits of rotr32(word[t>>2], 8*(t&3))."""
    t = np.arange(16)
    word = words[..., t >> 2].astype(np.uint64)
    shift = (8 * (t & 3)).astype(np.uint64)
    rotated = (word >> shift) | (word << (np.uint64(32) - shift))
    return (rotated & np.uint64(0xFFFF)).astype(np.int64)


def block_bits(rows: int, blocks: int, rng: tuple[int, int], group: int, plane: int) -> np.ndarray:
    """r of every element of a stored plane: int64 [rows, blocks, 16]. rng = (seed, offset); plane 0 row, 1 column."""
    seed, offset = (int(v) for v in rng)
    seed &= 0xFFFFFFFFFFFFFFFF
    counter = (np.arange(blocks)[None, :], np.arange(rows)[:, None], group, (2 * offset + plane) & 0xFFFFFFFF)
    return element_bits(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)))
