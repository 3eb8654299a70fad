"""What both drawings (inline SVG and PNG) share: colours, the range of an axis, round tick values."""

from __future__ import annotations

import math

from blockscale.report.document import Panel, Series

# (on a light ground, on a dark ground): grey for the baseline, then hues told apart by colour-blind readers too.
PALETTE = (
    ("#5f6670", "#b4bac4"),
    ("#1f6fc4", "#5fa4ee"),
    ("#d9620b", "#f59149"),
    ("#11876b", "#3cc6a1"),
    ("#8a4fc0", "#bb8cec"),
    ("#b8336a", "#ee7aa6"),
)


def color_index(series: Series) -> int:
    """The series' place in `PALETTE`, which repeats."""
    return series.color % len(PALETTE)


def ticks(low: float, high: float, wanted: int = 6) -> list[float]:
    """Round values (1, 2, 2.5 or 5 times a power of ten apart) inside [low, high], about ``wanted`` of them."""
    raw = (high - low) / max(wanted, 1)
    if not math.isfinite(raw) or raw <= 0:
        return [low]
    power = 10.0 ** math.floor(math.log10(raw))
    step = power * next(factor for factor in (1, 2, 2.5, 5, 10) if factor * power >= raw * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def tick_text(value: float) -> str:
    """``1500 -> "1,500"``, ``0.250 -> "0.25"``."""
    return f"{value:,.0f}" if float(value).is_integer() else f"{value:.6g}"


def x_range(panel: Panel) -> tuple[float, float]:
    """From the smallest to the largest x of the panel with 1.5 % of room at each end; never empty."""
    values = [value for series in panel.series for value in series.x if math.isfinite(value)]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 0.015 * (high - low) or 0.5
    return low - room, high + room


def y_range(panel: Panel) -> tuple[float, float]:
    """The panel's own range, or that of its curves and bounds (faint ones aside) with 6 % of room at each end."""
    if panel.y_range is not None:
        return panel.y_range
    values = [value for series in panel.series if series.style != "faint" for value in series.y if math.isfinite(value)]
    values += [value for _, value in panel.bounds]
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    room = 0.06 * (high - low) or 0.5
    return low - room, high + room


def legend(panels: tuple[Panel, ...]) -> list[Series]:
    """One series per label, faint ones aside, in order of first appearance."""
    seen: dict[str, Series] = {}
    for panel in panels:
        for series in panel.series:
            if series.style != "faint":
                seen.setdefault(series.label, series)
    return list(seen.values())
