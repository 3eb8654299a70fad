"""Comparing what the package returns with what the oracle says, by bits."""

import numpy as np
import torch


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """A CPU tensor as numpy; bfloat16 and float16 as float32 (exact)."""
    if tensor.dtype in (torch.bfloat16, torch.float16):
        tensor = tensor.float()
    return tensor.detach().numpy()


def differing(got: np.ndarray, expected: np.ndarray) -> np.ndarray:
    """Where two arrays of one type differ: floats by bits, except that any NaN equals any NaN."""
    got, expected = np.ascontiguousarray(got), np.ascontiguousarray(expected)
    if got.dtype != np.float32:
        return got != expected
    bits_differ = got.view(np.uint32) != expected.view(np.uint32)
    return bits_differ & ~(np.isnan(got) & np.isnan(expected))


def assert_same(got: torch.Tensor | np.ndarray, expected: np.ndarray, what: object = "") -> None:
    """Same dtype, same shape, same bits (NaN payloads apart); says where the first difference is."""
    got = as_numpy(got) if isinstance(got, torch.Tensor) else got
    assert got.dtype == expected.dtype, f"{what}: dtype {got.dtype}, expected {expected.dtype}"
    assert got.shape == expected.shape, f"{what}: shape {got.shape}, expected {expected.shape}"
    wrong = differing(got, expected)
    if wrong.any():
        where = tuple(int(i) for i in np.argwhere(wrong)[0])
        values = f"got {got[where]!r}, expected {expected[where]!r}"
        raise AssertionError(f"{what}: {wrong.sum()} of {wrong.size} differ, first at {where}: {values}")
