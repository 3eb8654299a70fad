"""A `Figure` as a PNG by matplotlib, an extra: without it everything else is still written."""

from __future__ import annotations

import io
import math
from pathlib import Path
from typing import Any

from blockscale.report.axes import PALETTE, color_index, legend, tick_text, ticks, x_range, y_range
from blockscale.report.document import Figure, Panel, Series
from blockscale.report.write import write_bytes

_INK, _SOFT, _RULE = "#1d2129", "#5c6470", "#dde1e7"


class PlottingUnavailableError(RuntimeError):
    """matplotlib is not installed."""


def write_png(path: str | Path, figure: Figure) -> Path:
    """Draw ``figure`` on a white ground (readable on light and dark pages) at 150 dots per inch.

    Raises:
        PlottingUnavailableError: matplotlib cannot be imported; the message says how to install it.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure as Canvas
        from matplotlib.ticker import FixedLocator, FuncFormatter
    except ImportError as error:
        raise PlottingUnavailableError(
            f"{Path(path).name} was not written: matplotlib is missing; install it with: pip install 'blockscale[plot]'"
        ) from error
    canvas = Canvas(figsize=(6.2 * len(figure.panels), 4.3), dpi=150, facecolor="white", layout="constrained")
    FigureCanvasAgg(canvas)
    all_axes = canvas.subplots(1, len(figure.panels), squeeze=False)[0]
    for axes, panel in zip(all_axes, figure.panels, strict=True):
        _draw(axes, panel)
        for axis, (low, high) in ((axes.xaxis, x_range(panel)), (axes.yaxis, y_range(panel))):
            axis.set_major_locator(FixedLocator(ticks(low, high)))
            axis.set_major_formatter(FuncFormatter(lambda value, _: tick_text(round(value, 12))))
    handles = [
        all_axes[0].plot([], [], color=PALETTE[color_index(series)][0], lw=2, label=series.label)[0]
        for series in legend(tuple(figure.panels))
    ]
    canvas.legend(handles=handles, loc="outside upper center", ncols=max(1, len(handles)), frameon=False, labelcolor=_INK)
    buffer = io.BytesIO()
    canvas.savefig(buffer, format="png", metadata={"Title": figure.title})
    return write_bytes(path, buffer.getvalue())


def _draw(axes: Any, panel: Panel) -> None:
    axes.set_xlim(*x_range(panel))
    axes.set_ylim(*y_range(panel))
    axes.set_title(panel.title, loc="left", fontsize=11, fontweight="bold", color=_INK)
    axes.set_xlabel(panel.x_label, color=_SOFT)
    axes.set_ylabel(panel.y_label, color=_SOFT)
    axes.tick_params(colors=_SOFT, length=0)
    axes.grid(axis="y", color=_RULE, lw=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(_SOFT)
    for label, value in panel.bounds:
        axes.axhline(value, color=_SOFT, lw=1, ls=(0, (5, 4)))
        axes.annotate(label, (0, value), (4, 3), xycoords=("axes fraction", "data"), textcoords="offset points",
                      ha="left", va="bottom", fontsize=8.5, color=_SOFT)  # fmt: skip
    for series in panel.series:
        _curve(axes, series)


def _curve(axes: Any, series: Series) -> None:
    color = PALETTE[color_index(series)][0]
    points = [(x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(x) and math.isfinite(y)]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if series.style == "faint":
        axes.plot(xs, ys, color=color, lw=0.8, alpha=0.22, zorder=1)
    elif series.style == "line":
        axes.plot(xs, ys, color=color, lw=1.8, zorder=2)
    else:
        width = 1.8 if series.style == "points" else 0.0
        axes.plot(xs, ys, color=color, lw=width, marker="o", ms=5, mec="white", mew=0.8, zorder=3)
