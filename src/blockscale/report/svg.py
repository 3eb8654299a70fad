"""A `Figure` as inline SVG, with nothing but the standard library, so that every HTML report has its curves.

Colours come from the page's CSS variables (`--c0`...), so one drawing suits a light and a dark ground.
"""

from __future__ import annotations

import math
from html import escape

from blockscale.report.axes import color_index, legend, tick_text, ticks, x_range, y_range
from blockscale.report.document import Figure, Panel, Series

WIDTH, HEIGHT = 520, 330
LEFT, RIGHT, TOP, BOTTOM = 58, 14, 30, 44


def render_svg(figure: Figure) -> str:
    """Every panel as an ``<svg>`` of its own under one legend; a browser wraps them when the window is narrow."""
    keys = "".join(
        f'<span class="key"><svg width="22" height="10" aria-hidden="true"><line x1="1" y1="5" x2="21" y2="5" '
        f'class="line s{color_index(series)}"/></svg>{escape(series.label)}</span>'
        for series in legend(tuple(figure.panels))
    )
    panels = "".join(_panel(panel, f"{figure.name}-{index}") for index, panel in enumerate(figure.panels))
    return f'<div class="legend">{keys}</div><div class="panels">{panels}</div>'


class _Scale:
    """Data to pixels."""

    def __init__(self, panel: Panel) -> None:
        self.x_low, self.x_high = x_range(panel)
        self.y_low, self.y_high = y_range(panel)

    def x(self, value: float) -> float:
        return LEFT + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - LEFT - RIGHT)

    def y(self, value: float) -> float:
        return TOP + (self.y_high - value) / (self.y_high - self.y_low) * (HEIGHT - TOP - BOTTOM)


def _panel(panel: Panel, clip: str) -> str:
    scale = _Scale(panel)
    parts = [
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(panel.title, quote=True)}">',
        f'<clipPath id="{clip}"><rect x="{LEFT}" y="{TOP - 4}" width="{WIDTH - LEFT - RIGHT + 4}" '
        f'height="{HEIGHT - TOP - BOTTOM + 8}"/></clipPath>',
        f'<text x="{LEFT}" y="16" class="title">{escape(panel.title)}</text>',
        *_axes(panel, scale),
        *_bounds(panel, scale),
        f'<g clip-path="url(#{clip})">',
        *(_curve(series, scale) for series in sorted(panel.series, key=lambda series: series.style != "faint")),
        "</g></svg>",
    ]
    return "".join(parts)


def _axes(panel: Panel, scale: _Scale) -> list[str]:
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    parts = []
    for value in ticks(scale.y_low, scale.y_high):
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 7}" y="{y + 4:.1f}" class="tick end">{tick_text(value)}</text>')
    for value in ticks(scale.x_low, scale.x_high):
        parts.append(f'<text x="{scale.x(value):.1f}" y="{bottom + 17}" class="tick mid">{tick_text(value)}</text>')
    parts.append(f'<line x1="{LEFT}" y1="{bottom}" x2="{right}" y2="{bottom}" class="axis"/>')
    middle = (TOP + bottom) / 2
    parts.append(f'<text x="{(LEFT + right) / 2}" y="{HEIGHT - 8}" class="label mid">{escape(panel.x_label)}</text>')
    parts.append(f'<text x="13" y="{middle}" class="label mid" transform="rotate(-90 13 {middle})">{escape(panel.y_label)}</text>')
    return parts


def _bounds(panel: Panel, scale: _Scale) -> list[str]:
    parts = []
    for label, value in panel.bounds:
        y = scale.y(value)
        parts.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" class="bound"/>')
        parts.append(f'<text x="{LEFT + 6}" y="{y - 5:.1f}" class="tick">{escape(label)}</text>')
    return parts


def _curve(series: Series, scale: _Scale) -> str:
    color = f"s{color_index(series)}"
    pixels = [
        (scale.x(x), scale.y(y), x, y) for x, y in zip(series.x, series.y, strict=True) if math.isfinite(x) and math.isfinite(y)
    ]
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py, _, _ in pixels)
    style = "faint" if series.style == "faint" else "line"
    drawn = "" if series.style == "dots" else f'<polyline points="{path}" class="{style} {color}"/>'
    if series.style in ("points", "dots"):
        drawn += "".join(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3.2" class="dot f{color_index(series)}">'
            f"<title>{escape(series.label)}, {tick_text(x)}: {y:.4f}</title></circle>"
            for px, py, x, y in pixels
        )
    return drawn
