"""A `HeatMap` as inline SVG and, by matplotlib, as a PNG; both in the same colours."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any

from blockscale.report.document import HeatMap
from blockscale.report.png import PlottingUnavailableError
from blockscale.report.write import write_bytes

#: from little to much; readable in grey and by colour-blind readers
_RAMP = ("#eef2f7", "#c6dbef", "#8fbfe0", "#4f94cd", "#1f5fa8", "#0b2f66")
_ALARM, _UNKNOWN, _INK, _SOFT = "#c4161c", "#ffffff", "#1d2129", "#5c6470"
_LEVELS = 24
_CELL, _WIDTH, _TOP, _BOTTOM = 16, 620, 8, 40


def shade(value: float | None, low: float, high: float, alarm: bool) -> str:
    """The colour of a cell: white for None, red for anything above zero in an ``alarm`` map."""
    if value is None or math.isnan(value):
        return _UNKNOWN
    if alarm:
        return _ALARM if value > 0 else _RAMP[0]
    share = 1.0 if value == math.inf else (min(max(value, low), high) - low) / (high - low) if high > low else 0.0
    place = round(share * _LEVELS) / _LEVELS * (len(_RAMP) - 1)
    below = min(int(place), len(_RAMP) - 2)
    return _mixed(_RAMP[below], _RAMP[below + 1], place - below)


def value_range(heat: HeatMap) -> tuple[float, float]:
    """The smallest and the largest finite value, (0, 1) when there is none; 0 is always the least of a share."""
    known = [v for row in heat.values for v in row if v is not None and math.isfinite(v)]
    if not known:
        return 0.0, 1.0
    return (min(known), max(known)) if heat.low is None else (heat.low, max(*known, heat.low))


def render_heatmap_svg(heat: HeatMap) -> str:
    """One ``<svg>``; cells of the same colour side by side are one rectangle that says what it holds when pointed at."""
    low, high = value_range(heat)
    left = 14 + 6.2 * max((len(label) for label in heat.rows), default=0)
    cell = _WIDTH / max(len(heat.columns), 1)
    height = _TOP + _CELL * len(heat.rows) + _BOTTOM
    parts = [
        f'<svg class="chart" viewBox="0 0 {left + _WIDTH + 8:.0f} {height}" role="img" '
        f'aria-label="{escape(heat.title, quote=True)}">',
        f'<rect x="{left:.1f}" y="{_TOP}" width="{_WIDTH}" height="{_CELL * len(heat.rows)}" fill="{_UNKNOWN}"/>',
    ]
    for i, (label, row) in enumerate(zip(heat.rows, heat.values, strict=True)):
        y = _TOP + i * _CELL
        parts.append(f'<text x="{left - 6:.1f}" y="{y + 12}" class="tick end">{escape(label)}</text>')
        for first, last, color, most in _runs(row, low, high, heat.alarm):
            steps = heat.columns[first] if first == last else f"{heat.columns[first]} to {heat.columns[last]}"
            parts.append(
                f'<rect x="{left + first * cell:.2f}" y="{y}" width="{(last - first + 1) * cell:.2f}" height="{_CELL - 1}" '
                f'fill="{color}"><title>{escape(label)}, {escape(steps)}: {_number(most)}</title></rect>'
            )
    bottom = _TOP + _CELL * len(heat.rows)
    for place in _places(len(heat.columns)):
        x = left + (place + 0.5) * cell
        parts.append(f'<text x="{x:.1f}" y="{bottom + 15}" class="tick mid">{escape(heat.columns[place])}</text>')
    key = "red: above zero" if heat.alarm else f"pale {_number(low)} to dark {_number(high)}"
    parts.append(f'<text x="{left:.1f}" y="{bottom + 33}" class="label">{escape(heat.x_label)}; {key}; white: not known</text>')
    return "".join(parts) + "</svg>"


def write_heatmaps_png(path: str | Path, maps: Sequence[HeatMap]) -> Path:
    """Draw heat maps below each other at 150 dots per inch.

    Raises:
        PlottingUnavailableError: matplotlib cannot be imported; the message says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
    except ImportError as error:
        raise PlottingUnavailableError(
            f"{Path(path).name} was not written: matplotlib is missing; install it with: pip install 'blockscale[plot]'"
        ) from error
    heights = [0.9 + 0.2 * max(len(heat.rows), 1) for heat in maps]
    canvas = Canvas(figsize=(11, sum(heights)), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(canvas)
    all_axes = canvas.subplots(len(maps), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axes, heat in zip(all_axes, maps, strict=True):
        _draw(axes, heat)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Title": "; ".join(heat.title for heat in maps)})
    return write_bytes(path, buffer.getvalue())


def _draw(axes: Any, heat: HeatMap) -> None:
    low, high = value_range(heat)
    colors = [[[int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in (shade(v, low, high, heat.alarm) for v in row)]
              for row in heat.values]  # fmt: skip
    if colors and colors[0]:
        axes.imshow(colors, aspect="auto", interpolation="nearest")
    key = "red: above zero" if heat.alarm else f"pale {_number(low)}, dark {_number(high)}"
    axes.set_title(f"{heat.title} ({key})", loc="left", fontsize=10, fontweight="bold", color=_INK)
    axes.set_yticks(range(len(heat.rows)), heat.rows, fontsize=7)
    places = _places(len(heat.columns))
    axes.set_xticks(places, [heat.columns[i] for i in places], fontsize=8)
    axes.set_xlabel(heat.x_label, fontsize=8, color=_SOFT)
    axes.tick_params(colors=_SOFT, length=0)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _runs(row: Sequence[float | None], low: float, high: float, alarm: bool) -> Iterator[tuple[int, int, str, float | None]]:
    """(first, last, colour, largest value) of neighbours of one colour, those not known left out."""
    cells = [(i, value, shade(value, low, high, alarm)) for i, value in enumerate(row)]
    for color, run in groupby(cells, key=lambda cell: cell[2]):
        members = list(run)
        if color != _UNKNOWN:
            yield members[0][0], members[-1][0], color, max(v for _, v, _ in members if v is not None)


def _places(columns: int, wanted: int = 8) -> list[int]:
    """About ``wanted`` columns to label, the first and the last among them."""
    if columns <= wanted:
        return list(range(columns))
    return [round(i * (columns - 1) / (wanted - 1)) for i in range(wanted)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _mixed(a: str, b: str, share: float) -> str:
    pairs = ((int(a[i : i + 2], 16), int(b[i : i + 2], 16)) for i in (1, 3, 5))
    return "#" + "".join(f"{round(x + (y - x) * share):02x}" for x, y in pairs)
