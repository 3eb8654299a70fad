"""Reports on a terminal, by rich. Colour is added by the terminal's own ability; a pipe gets plain text."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table as RichTable
from rich.text import Text

from blockscale.report.document import Report, Table, Verdicts


def table_to_rich(table: Table) -> RichTable:
    """``table`` as a rich table."""
    drawn = RichTable(title=table.title, caption=table.note or None, box=box.SIMPLE_HEAD, title_justify="left")
    drawn.caption_justify = "left"
    for index, column in enumerate(table.columns):
        drawn.add_column(column.title, justify=column.align, no_wrap=index == 0, overflow="fold")
    for row in table.cells():
        drawn.add_row(*(Text(cell) for cell in row))
    return drawn


def print_report(console: Console, report: Report) -> None:
    """Print tables and verdicts, in order; details, facts, figures and paragraphs are left to the HTML."""
    for section in report.sections:
        if section.detail:
            continue
        for block in section.blocks:
            if isinstance(block, Table):
                console.print(table_to_rich(block))
            elif isinstance(block, Verdicts):
                for verdict in block.items:
                    mark = ("yes", "green") if verdict.holds else ("no", "bold red")
                    line = Text.assemble(f"{verdict.claim}: ", mark, f" ({verdict.detail})")
                    console.print(line, soft_wrap=True)
