"""What a watch shows: its table, its report in words, its heat maps and its page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from blockscale.report import Column, HeatMap, Report, Section, Table
from blockscale.report import text as show
from blockscale.watching.findings import METRICS, Finding
from blockscale.watching.history import History, Key

_TITLES = {
    "nan": "NaNs",
    "inf": "infinities",
    "saturated": "saturated elements, percent",
    "underflow": "underflowed elements, percent",
    "amax": "largest magnitude, log2",
    "spread": "spread of block scales, log2",
}
_SHARES = ("saturated", "underflow")


def _scientific(value: show.Printable) -> str:
    return show.plain(value) if value is None or isinstance(value, str) else f"{float(value):.3g}"


_COLUMNS = (
    Column("layer", "layer", align="left"),
    Column("role", "role", align="left"),
    Column("format", "format", align="left"),
    Column("step", "step"),
    Column("nan", "NaN", show.count),
    Column("inf", "Inf", show.count),
    Column("experts", "in experts", align="left"),
    Column("saturated", "saturated", show.percent(3)),
    Column("underflow", "underflow", show.percent(3)),
    Column("amax", "amax", _scientific),
    Column("spread", "scale spread, log2", show.fixed(0)),
)


@dataclass
class Latest:
    """What is known of one tensor: of the newest step, and of the newest one in which its scales were looked at."""

    step: int = 0
    format: str | None = None
    experts: tuple[int, ...] = ()
    measured: list[float] = field(default_factory=lambda: [math.nan] * len(METRICS))

    def update(self, step: int, fmt: str | None, experts: tuple[int, ...], measured: list[float]) -> None:
        """A newer step; what it does not know stays."""
        self.step, self.format, self.experts = step, fmt or self.format, experts
        self.measured = [old if new != new else new for old, new in zip(self.measured, measured, strict=True)]


def build_table(latest: dict[Key, Latest], step: int | None, roles: Sequence[str] | None = None) -> Table:
    """One row a tensor, in the order of a step."""
    rows = []
    for (layer, role), found in latest.items():
        if roles is not None and role not in roles:
            continue
        known = {n: None if v != v else 100 * v if n in _SHARES else v for n, v in zip(METRICS, found.measured, strict=True)}
        experts = ", ".join(map(str, found.experts[:6])) + (" ..." if len(found.experts) > 6 else "")
        row = {"layer": layer, "role": role, "format": found.format, "experts": experts or None, "step": found.step}
        rows.append({**row, **known})
    title = "nothing seen yet" if step is None else f"after step {step}"
    note = "step: when the tensor was looked at last; saturated, underflow and spread: of the last full step"
    return Table(title, _COLUMNS, rows, note=note)


def build_heatmap(history: History, metric: str, role: str | None) -> HeatMap:
    """Layer by step; of a layer's roles the worst, or the one that is named. NaNs and infinities: every step; else full steps.

    Raises:
        ValueError: no such metric or role.
    """
    if metric not in METRICS:
        raise ValueError(f"metric={metric!r} is not one of {METRICS}")
    keys = [key for key in history.keys if role is None or key[1] == role]
    if role is not None and not keys:
        raise ValueError(f"role={role!r} was not seen; seen: {', '.join(sorted({r for _, r in history.keys}))}")
    alarm = metric in ("nan", "inf")
    kept = [i for i, column in enumerate(history.columns) if alarm or column.full]
    grid = history.grid(metric)[:, kept]
    known = {key for key in keys if not bool(grid[history.keys[key]].isnan().all())}
    layers = list(dict.fromkeys(layer for layer, role in keys if (layer, role) in known))
    if metric in _SHARES:
        grid = 100 * grid
    elif metric == "amax":
        grid = torch.where(grid > 0, grid.log2(), torch.nan)
    values: list[list[float | None]] = []
    for layer in layers:
        row = torch.full((grid.shape[1],), torch.nan)
        for key in keys:
            if key[0] == layer:
                row = torch.fmax(row, grid[history.keys[key]])
        values.append([None if v != v else v for v in row.tolist()])
    columns = [str(c.first) if c.first == c.last else f"{c.first}-{c.last}" for c in (history.columns[i] for i in kept)]
    title = f"{_TITLES[metric]}, {'the worst role of each layer' if role is None else f'role {role}'}"
    low = None if metric in ("amax", "spread") else 0.0
    return HeatMap(f"heatmap-{metric}", title, layers, columns, values, low=low, alarm=alarm)


def build_page(maps: Sequence[HeatMap], words: str, table: Table) -> Report:
    """The HTML page: words, heat maps, table."""
    lead, *others = words.split("\n")
    found = [Section("What was found", others)] if others else []
    return Report("What the watch saw", lead, [*found, Section("Layer by step", maps), Section("Newest step", [table])])


def in_words(findings: Sequence[Finding], layers: int, steps: int, step: int | None, model: nn.Module | None) -> str:
    """The report: first what matters most."""
    watched = f"{layers} layers watched in {steps} steps"
    if not findings:
        return f"Nothing wrong: no NaN, no infinity; {watched}" + ("." if step is None else f", the last one {step}.")
    lines = []
    for found in findings:
        lines.append(str(found))
        if found.before is not None:
            layer, role = found.before
            lines.append(f"  seen just before it, and clean: layer {layer}, role {role}; it arose between the two")
        if found.trail:
            shown = ", ".join(f"{layer} {role}" for layer, role in found.trail[:6])
            more = f" and {len(found.trail) - 6} more" if len(found.trail) > 6 else ""
            lines.append(f"  then, in the same step: {shown}{more}")
    parameters = _not_finite(model) if model is not None else []
    if parameters:
        shown = ", ".join(parameters[:12]) + (f" and {len(parameters) - 12} more" if len(parameters) > 12 else "")
        lines.append(f"not finite now: {shown}")
    lines.append(f"({watched})")
    return "\n".join(lines)


@torch.no_grad()
def _not_finite(model: nn.Module) -> list[str]:
    """Parameters, and gradients (``name.grad``), that hold a NaN or an infinity now. Reads every one: for reports only."""
    found = []
    for name, parameter in model.named_parameters():
        for shown, tensor in ((name, parameter), (f"{name}.grad", parameter.grad)):
            if tensor is not None and tensor.is_floating_point() and not bool(tensor.isfinite().all()):
                found.append(shown)
    return found
