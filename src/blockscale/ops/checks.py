"""Checks of arguments: what metadata shows is checked by the wrappers, what values show by the implementations.

Offsets on a GPU are not read on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def names(dtypes: Sequence[torch.dtype]) -> str:
    """dtypes as a person reads them."""
    return ", ".join(map(str, dtypes))


def dtype(name: str, x: object, legal: Sequence[torch.dtype]) -> Tensor:
    """``x`` as a tensor of one of the legal dtypes, else ``TypeError``."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} is {type(x).__name__}; a tensor of dtype {names(legal)} is needed")
    if x.dtype not in legal:
        raise TypeError(f"{name} has dtype {x.dtype}; legal: {names(legal)}")
    return x


def matrix(name: str, x: object, rows: str = "M", columns: str = "K") -> Tensor:
    """A 2-D float tensor with at least one column."""
    t = dtype(name, x, FLOATS)
    if t.dim() != 2:
        raise ValueError(f"{name} has shape {tuple(t.shape)}; ({rows}, {columns}) is needed")
    if t.shape[1] == 0:
        raise ValueError(f"{name} has shape {tuple(t.shape)}: {columns}=0 columns; at least 1 is needed")
    return t


def shape(name: str, x: Tensor, expected: tuple[int, ...], meaning: str) -> None:
    """``ValueError`` unless ``x`` has the expected shape."""
    if tuple(x.shape) != expected:
        raise ValueError(f"{name} has shape {tuple(x.shape)}; {expected} is needed: {meaning}")


def same_device(**tensors: Tensor | None) -> None:
    """``ValueError`` unless all tensors lie on the first one's device."""
    first_name, first = next((n, t) for n, t in tensors.items() if t is not None)
    for name, t in tensors.items():
        if t is not None and t.device != first.device:
            raise ValueError(f"{name} is on {t.device} but {first_name} is on {first.device}; one device is needed")


def offsets(x: object, num_groups: int | None = None) -> Tensor:
    """int64[G+1] by metadata."""
    t = dtype("offsets", x, (torch.int64,))
    if t.dim() != 1 or t.shape[0] < 1:
        raise ValueError(f"offsets has shape {tuple(t.shape)}; (num_groups + 1,) is needed")
    if num_groups is not None and t.shape[0] != num_groups + 1:
        raise ValueError(f"offsets has shape {tuple(t.shape)}; ({num_groups + 1},) is needed for {num_groups} groups")
    return t


def offset_values(x: Tensor, capacity: int) -> None:
    """Values of offsets that lie on the CPU: they start at 0, never decrease, and end within the buffer.

    On another device nothing is read.
    """
    if x.device.type != "cpu":
        return
    values = x.tolist()
    if values[0] != 0:
        raise ValueError(f"offsets[0]={values[0]}; offsets start at 0")
    for g, (start, end) in enumerate(pairwise(values)):
        if end < start:
            raise ValueError(
                f"offsets decrease at group {g}: offsets[{g}]={start}, offsets[{g + 1}]={end}; "
                f"each must be at least the one before (a group's size is not negative)"
            )
    if values[-1] > capacity:
        raise ValueError(f"offsets[-1]={values[-1]}: the sizes sum to more than the {capacity} rows of the buffer")


def count(name: str, value: object, least: int = 1, most: int | None = None) -> int:
    """An integer that is at least ``least`` and, if given, at most ``most``."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; an int is needed")
    if value < least:
        raise ValueError(f"{name}={value} is not legal; it must be at least {least}")
    if most is not None and value > most:
        raise ValueError(f"{name}={value} is not legal; it must be at most {most}")
    return value


def within(name: str, value: object, most: int, meaning: str) -> int:
    """An integer in 1..most; ``meaning`` says what ``most`` is."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; an int is needed")
    if not 1 <= value <= most:
        raise ValueError(f"{name}={value} is not legal; it must be in 1..{most}, {meaning}")
    return value


def flag(name: str, value: object) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}={value!r} is {type(value).__name__}; True or False is needed")
    return value


def rng(x: object) -> Tensor:
    """int64[2]."""
    t = dtype("rng", x, (torch.int64,))
    shape("rng", t, (2,), "(seed, offset)")
    return t
