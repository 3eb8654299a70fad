"""`Bars` as inline SVG, in the page's own colours."""

from __future__ import annotations

from html import escape

from blockscale.report.axes import PALETTE
from blockscale.report.document import Bars
from blockscale.report.text import count

WIDTH, LABEL, VALUE, ROW, BAR = 1040, 110, 330, 26, 16


def render_bars_svg(bars: Bars) -> str:
    """One ``<svg>`` with a legend above it; the longest bar fills the width."""
    longest = max((sum(sizes) for _, sizes in bars.rows), default=0) or 1
    room = WIDTH - LABEL - VALUE
    keys = "".join(
        f'<span class="key"><svg width="14" height="10" aria-hidden="true"><rect width="12" height="10" '
        f'class="f{color % len(PALETTE)}"/></svg>{escape(name)}</span>'
        for name, color in bars.parts
    )
    drawn = [_row(index, room / longest, bars) for index in range(len(bars.rows))]
    height = ROW * len(bars.rows) + 4
    picture = f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(bars.title, quote=True)}">'
    return f'<div class="legend">{keys}</div>{picture}{"".join(drawn)}</svg>'


def _row(index: int, scale: float, bars: Bars) -> str:
    top, x = ROW * index + 4, float(LABEL)
    label, values = bars.rows[index]
    parts = [f'<text x="{LABEL - 8}" y="{top + BAR - 3}" class="end">{escape(label)}</text>']
    for value, (name, color) in zip(values, bars.parts, strict=True):
        # what is there can be seen, however few
        width = max(value * scale, 1.5) if value else 0.0
        if width:
            parts.append(
                f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{BAR}" class="f{color % len(PALETTE)}">'
                f"<title>{escape(f'{label} {name}: {count(value)}')}</title></rect>"
            )
        x += width
    said = ", ".join(f"{count(value)} {name}" for value, (name, _) in zip(values, bars.parts, strict=True) if value)
    parts.append(f'<text x="{x + 8:.1f}" y="{top + BAR - 3}">{escape(said)}</text>')
    return "".join(parts)
