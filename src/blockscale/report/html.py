"""A `Report` as one HTML file: no script, no external resource, readable on light and dark grounds and on paper."""

from __future__ import annotations

from html import escape
from pathlib import Path

from blockscale.report.axes import PALETTE
from blockscale.report.bars import render_bars_svg
from blockscale.report.document import Bars, Block, Facts, Figure, HeatMap, Listing, Report, Table, Verdicts
from blockscale.report.heatmap import render_heatmap_svg
from blockscale.report.svg import render_svg
from blockscale.report.write import write_text

_STYLE = """
:root{color-scheme:light dark;--ground:#fff;--ink:#1d2129;--soft:#5c6470;--rule:#dde1e7;--band:#f5f7f9;
--good:#11764f;--bad:#b3261e;LIGHT}
@media(prefers-color-scheme:dark){:root{--ground:#15181d;--ink:#e6e9ee;--soft:#9aa3af;--rule:#333a44;--band:#1d2128;
--good:#4cc790;--bad:#ff8078;DARK}}
*{box-sizing:border-box}
body{margin:0;background:var(--ground);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI",Helvetica,Arial,"DejaVu Sans",sans-serif}
main{max-width:1120px;margin:0 auto;padding:32px 24px 56px}
h1{font-size:26px;margin:0 0 6px;line-height:1.25}h2{font-size:18px;margin:36px 0 10px}
h3{font-size:14px;margin:18px 0 6px}
p{max-width:78ch;margin:8px 0}.lead{font-size:16px;color:var(--soft)}
.note,figcaption{color:var(--soft);font-size:13px;max-width:90ch}
.scroll{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:14px}
th,td{padding:6px 12px;border-bottom:1px solid var(--rule);text-align:right;vertical-align:bottom}
th{font-weight:600;color:var(--soft)}td:not(.left),td:first-child{white-space:nowrap}
.left{text-align:left;overflow-wrap:anywhere}td:first-child,th:first-child{padding-left:4px}
.facts th{text-align:left;font-weight:400;white-space:nowrap;vertical-align:top}
.facts td{text-align:left;white-space:normal;overflow-wrap:anywhere}
ul.verdicts{list-style:none;padding:0;margin:8px 0}
ul.verdicts li{padding:7px 12px;margin:6px 0;background:var(--band);border-left:4px solid var(--good)}
ul.verdicts li.no{border-color:var(--bad)}.verdicts b{color:var(--good)}.verdicts .no b{color:var(--bad)}
figure{margin:10px 0}.panels{display:flex;flex-wrap:wrap;gap:16px}.chart{flex:1 1 440px;max-width:100%;height:auto}
.legend{display:flex;flex-wrap:wrap;gap:4px 18px;font-size:13px;margin-bottom:4px}
.key svg{vertical-align:0;margin-right:6px}
.chart text{fill:var(--soft);font-size:12px}.chart .title{fill:var(--ink);font-size:13px;font-weight:600}
.end{text-anchor:end}.mid{text-anchor:middle}
.grid{stroke:var(--rule);stroke-width:1}.axis{stroke:var(--soft);stroke-width:1}
.bound{stroke:var(--soft);stroke-dasharray:5 4;stroke-width:1.2}
.line{fill:none;stroke-width:2;stroke-linejoin:round}.faint{fill:none;stroke-width:1;opacity:.22}
.dot{stroke:var(--ground);stroke-width:1}
.listing{font:12.5px/1.45 ui-monospace,Menlo,Consolas,"DejaVu Sans Mono",monospace;background:var(--band)}
.listing td{padding:0 12px;border:0;text-align:left;white-space:pre}.listing td:last-child{color:var(--soft);white-space:normal}
.listing tr.marked td{color:var(--bad);font-weight:600}
footer{margin-top:40px;color:var(--soft);font-size:13px}
"""


def render_html(report: Report) -> str:
    """The whole page as text."""
    sections = "".join(
        f"<section><h2>{escape(section.title)}</h2>{''.join(_block(block) for block in section.blocks)}</section>"
        for section in report.sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(report.title)}</title><style>{_style()}</style></head><body><main>"
        f'<h1>{escape(report.title)}</h1><p class="lead">{escape(report.lead)}</p>{sections}</main></body></html>\n'
    )


def write_html(path: str | Path, report: Report) -> Path:
    """Write `render_html` to ``path``, whole or not at all."""
    return write_text(path, render_html(report))


def _style() -> str:
    light = "".join(f"--c{index}:{pair[0]};" for index, pair in enumerate(PALETTE))
    dark = "".join(f"--c{index}:{pair[1]};" for index, pair in enumerate(PALETTE))
    colors = "".join(f".s{index}{{stroke:var(--c{index})}}.f{index}{{fill:var(--c{index})}}" for index in range(len(PALETTE)))
    return _STYLE.replace("LIGHT", light).replace("DARK", dark).strip().replace("\n", "") + colors


def _block(block: Block) -> str:
    if isinstance(block, Table):
        return _table(block)
    if isinstance(block, Figure):
        return (
            f'<figure aria-label="{escape(block.title, quote=True)}">{render_svg(block)}'
            f"<figcaption>{escape(block.caption)}</figcaption></figure>"
        )
    if isinstance(block, HeatMap):
        return f"<figure><h3>{escape(block.title)}</h3>{render_heatmap_svg(block)}</figure>"
    if isinstance(block, Verdicts):
        return _verdicts(block)
    if isinstance(block, Facts):
        rows = "".join(f"<tr><th>{escape(name)}</th><td>{escape(value)}</td></tr>" for name, value in block.items.items())
        return f'<div class="scroll"><table class="facts">{rows}</table></div>'
    if isinstance(block, Bars):
        return f"<figure><h3>{escape(block.title)}</h3>{render_bars_svg(block)}</figure>"
    if isinstance(block, Listing):
        return _listing(block)
    return f"<p>{escape(block)}</p>"


def _table(table: Table) -> str:
    left = [' class="left"' if column.align == "left" else "" for column in table.columns]
    head = "".join(f"<th{mark}>{escape(column.title)}</th>" for mark, column in zip(left, table.columns, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{mark}>{escape(cell)}</td>" for mark, cell in zip(left, cells, strict=True)) + "</tr>"
        for cells in table.cells()
    )
    title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    return f'{title}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{note}'


def _verdicts(verdicts: Verdicts) -> str:
    lines = "".join(
        f'<li class="{"yes" if verdict.holds else "no"}">{escape(verdict.claim)}: '
        f"<b>{'yes' if verdict.holds else 'no'}</b> ({escape(verdict.detail)})</li>"
        for verdict in verdicts.items
    )
    return f'<ul class="verdicts">{lines}</ul>'


def _listing(listing: Listing) -> str:
    mark = ' class="marked"'
    rows = "".join(
        f"<tr{mark if line.marked else ''}><td>{escape(line.place)}</td><td>{escape(line.text)}</td>"
        f"<td>{escape(line.remark)}</td></tr>"
        for line in listing.lines
    )
    note = f'<p class="note">{escape(listing.note)}</p>' if listing.note else ""
    return f'<h3>{escape(listing.title)}</h3><div class="scroll"><table class="listing">{rows}</table></div>{note}'
