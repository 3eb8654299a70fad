"""What heat maps are drawn from: the metrics of each tensor by step, in bounded memory.

Long runs keep at most ``limit`` columns: when they are full, neighbours are merged by their maxima, so nothing bad is lost.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from blockscale.watching.findings import METRICS

Key = tuple[str, str]


@dataclass
class Column:
    """Steps ``first`` to ``last`` and the metrics of each tensor; NaN: not known. ``full``: one of them was a full step."""

    first: int
    last: int
    full: bool
    values: torch.Tensor  # float32 (keys known then, metrics), never written to


@dataclass
class History:
    """Columns in order of steps; rows in order of first appearance."""

    limit: int
    keys: dict[Key, int] = field(default_factory=dict)
    columns: list[Column] = field(default_factory=list)
    _clean: torch.Tensor = field(default_factory=lambda: torch.empty(0, len(METRICS)))  # of every clean step

    def add(self, step: int, full: bool, keys: list[Key], measured: torch.Tensor) -> None:
        """One more step: the metrics (K, METRICS) of these tensors."""
        index = [self.keys.setdefault(key, len(self.keys)) for key in keys]
        values = torch.full((len(self.keys), len(METRICS)), torch.nan)
        values[index] = measured.float()
        self._append(Column(step, step, full, values))

    def add_clean(self, step: int) -> None:
        """One more step: no NaN and no infinity in any tensor, the rest not known."""
        if self._clean.shape[0] != len(self.keys):
            self._clean = torch.full((len(self.keys), len(METRICS)), torch.nan)
            self._clean[:, :2] = 0
        self._append(Column(step, step, False, self._clean))

    def _append(self, column: Column) -> None:
        self.columns.append(column)
        if len(self.columns) > self.limit:
            pairs = zip(self.columns[::2], self.columns[1::2], strict=False)
            odd = self.columns[-1:] if len(self.columns) % 2 else []
            self.columns = [_merged(a, b) for a, b in pairs] + odd

    def grid(self, metric: str) -> torch.Tensor:
        """float32 (rows, columns) of one metric."""
        index = METRICS.index(metric)
        grid = torch.full((len(self.keys), len(self.columns)), torch.nan)
        for i, column in enumerate(self.columns):
            grid[: column.values.shape[0], i] = column.values[:, index]
        return grid


def _merged(a: Column, b: Column) -> Column:
    values = b.values.clone()
    rows = a.values.shape[0]
    values[:rows] = torch.fmax(a.values, values[:rows])
    return Column(a.first, b.last, a.full or b.full, values)
