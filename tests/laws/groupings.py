"""What hypothesis draws for the laws: sizes of groups, room behind them, and what lies in the dead rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from hypothesis import strategies as st
from support import offsets_of
from torch import Tensor

MAX_GROUPS, MAX_SIZE, MAX_ROWS = 130, 300, 4000
#: sizes at which a tile, a block or a path of a kernel ends
EDGES = (0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 300)
#: what dead rows hold
FILLS = (math.nan, 3.0, math.inf, -math.inf)
#: what padding bytes hold: NaN codes of E4M3 and E8M0, E5M2's infinity, small and large finite codes
BYTES = (0x7F, 0xFF, 0x7C, 0x01, 0x3C, 0x88)


@dataclass(frozen=True)
class Grouping:
    """Sizes, rows behind the last group, and a seed for the numbers."""

    sizes: tuple[int, ...]
    room: int
    seed: int

    @property
    def offsets(self) -> Tensor:
        return offsets_of(list(self.sizes))

    @property
    def live(self) -> int:
        return sum(self.sizes)

    @property
    def capacity(self) -> int:
        return self.live + self.room

    def some_groups(self, most: int = 4) -> list[int]:
        """Indices of a few groups to run on their own: the first, the last, the largest, and the last that has rows."""
        if not self.sizes:
            return []
        largest = max(range(len(self.sizes)), key=self.sizes.__getitem__)
        last = max((g for g, size in enumerate(self.sizes) if size), default=0)
        return sorted({0, len(self.sizes) - 1, largest, last})[:most]


@st.composite
def groupings(draw: st.DrawFn, max_rows: int = MAX_ROWS, max_groups: int = MAX_GROUPS) -> Grouping:
    """0..130 groups of 0..300 rows, at most ``max_rows`` in all, and 0..200 rows behind them."""
    count = draw(st.one_of(st.integers(0, 4), st.integers(0, max_groups)))
    size = st.one_of(st.sampled_from(EDGES), st.integers(0, MAX_SIZE))
    if count > 20:  # many groups: most of them small or empty, as a router leaves them
        size = st.one_of(st.just(0), st.integers(0, 40), size)
    sizes, left = [], max_rows
    for _ in range(count):
        sizes.append(min(draw(size), left))
        left -= sizes[-1]
    return Grouping(tuple(sizes), draw(st.sampled_from((0, 1, 5, 128, 200))), draw(st.integers(0, 2**20)))


def filled(x: Tensor, live: int, value: float) -> Tensor:
    """A copy whose rows from ``live`` on hold ``value``."""
    x = x.clone()
    x[live:] = value
    return x
