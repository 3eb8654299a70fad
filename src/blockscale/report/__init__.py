"""The one writer of tables, figures, JSON and HTML that every command uses.

A command describes what it found once, as a `Report` of `Section`s holding `Facts`, `Verdicts`, `Table`s and `Figure`s, and
hands it to a writer: `print_report` (terminal), `write_html` (one file, no external resource), `write_png` (needs the
matplotlib extra), `write_json`. Every file is written to a temporary name and renamed.
"""

from blockscale.report.console import print_report, table_to_rich
from blockscale.report.document import (
    Bars,
    Column,
    Facts,
    Figure,
    HeatMap,
    Line,
    Listing,
    Panel,
    Report,
    Section,
    Series,
    Table,
    Verdict,
    Verdicts,
)
from blockscale.report.environment import describe_environment
from blockscale.report.heatmap import write_heatmaps_png
from blockscale.report.html import render_html, write_html
from blockscale.report.png import PlottingUnavailableError, write_png
from blockscale.report.progress import Progress, make_progress
from blockscale.report.write import to_jsonable, write_bytes, write_json, write_text

__all__ = [
    "Bars",
    "Column",
    "Facts",
    "Figure",
    "HeatMap",
    "Line",
    "Listing",
    "Panel",
    "PlottingUnavailableError",
    "Progress",
    "Report",
    "Section",
    "Series",
    "Table",
    "Verdict",
    "Verdicts",
    "describe_environment",
    "make_progress",
    "print_report",
    "render_html",
    "table_to_rich",
    "to_jsonable",
    "write_bytes",
    "write_heatmaps_png",
    "write_html",
    "write_json",
    "write_png",
    "write_text",
]
