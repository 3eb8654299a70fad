"""What a report is made of: plain frozen dataclasses, no rendering.

Values stay numbers here; a `Column` knows how to print its own. ``None`` prints as a dash and means "does not apply".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from blockscale.report.text import plain

Value = str | int | float | bool | None
Style = Literal["line", "faint", "points", "dots"]


@dataclass(frozen=True)
class Column:
    """One column of a `Table`: the key of its value in a row, its title and how a value prints."""

    key: str
    title: str
    show: Callable[[Value], str] = plain
    align: Literal["left", "right"] = "right"


@dataclass(frozen=True)
class Table:
    """Rows of named values. Every row must hold every column's key.

    Raises:
        ValueError: a row lacks a column's key.
    """

    title: str
    columns: Sequence[Column]
    rows: Sequence[Mapping[str, Value]]
    note: str = ""

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            missing = [column.key for column in self.columns if column.key not in row]
            if missing:
                raise ValueError(f"row {index} of table {self.title!r} lacks {missing}; it holds {sorted(row)}")

    def cells(self) -> list[list[str]]:
        """The printed text of every cell, row by row."""
        return [[column.show(row[column.key]) for column in self.columns] for row in self.rows]


@dataclass(frozen=True)
class Series:
    """Points of one curve. ``color`` indexes the palette, so the same thing keeps its colour in every panel.

    ``style``: "line"; "faint" (raw data behind a smoothed line, without a legend entry); "points" (markers on a line);
    "dots" (markers alone).

    Raises:
        ValueError: ``x`` and ``y`` differ in length.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    color: int = 0
    style: Style = "line"

    def __post_init__(self) -> None:
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.label!r}: x has {len(self.x)} values, y has {len(self.y)}")


@dataclass(frozen=True)
class Panel:
    """One pair of axes. ``bounds``: horizontal dashed lines, (label, y). ``y_range``: None lets the data decide."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    bounds: Sequence[tuple[str, float]] = ()
    y_range: tuple[float, float] | None = None


@dataclass(frozen=True)
class Figure:
    """Panels side by side, with a caption below. ``name`` is the file name without its ending."""

    name: str
    title: str
    panels: Sequence[Panel]
    caption: str = ""


@dataclass(frozen=True)
class HeatMap:
    """A value for each row and column, drawn as colours; None (or NaN): not known.

    ``low``: the value of the palest colour, None lets the data decide. ``alarm``: whatever is above zero is red.

    Raises:
        ValueError: ``values`` is not one row a label with one value a column.
    """

    name: str
    title: str
    rows: Sequence[str]
    columns: Sequence[str]
    values: Sequence[Sequence[float | None]]
    x_label: str = "step"
    low: float | None = None
    alarm: bool = False

    def __post_init__(self) -> None:
        if len(self.values) != len(self.rows) or any(len(row) != len(self.columns) for row in self.values):
            raise ValueError(f"heat map {self.name!r}: values are not {len(self.rows)} rows of {len(self.columns)} columns")


@dataclass(frozen=True)
class Verdict:
    """One sentence that is true or not, such as "MXFP8 within 1 % of bf16", and the number behind it."""

    claim: str
    holds: bool
    detail: str

    def __str__(self) -> str:
        return f"{self.claim}: {'yes' if self.holds else 'no'} ({self.detail})"


@dataclass(frozen=True)
class Verdicts:
    """A list of verdicts."""

    items: Sequence[Verdict]


@dataclass(frozen=True)
class Facts:
    """Names and values, printed as two columns."""

    items: Mapping[str, str]


@dataclass(frozen=True)
class Bars:
    """A horizontal bar a row, cut into parts that mean the same in every row; its length is the sum of its parts.

    Attributes:
        parts: what each part means, with its colour in the palette.
        rows: label and the parts' sizes.

    Raises:
        ValueError: a row has another number of parts, or a negative one.
    """

    title: str
    parts: Sequence[tuple[str, int]]
    rows: Sequence[tuple[str, Sequence[float]]]

    def __post_init__(self) -> None:
        for label, sizes in self.rows:
            if len(sizes) != len(self.parts) or min(sizes, default=0) < 0:
                raise ValueError(f"bar {label!r} of {self.title!r} holds {list(sizes)}; needs {len(self.parts)} sizes >= 0")


@dataclass(frozen=True)
class Line:
    """A line of a `Listing`: where, what, a remark beside it, and whether it is what the listing is about."""

    place: str
    text: str
    remark: str = ""
    marked: bool = False


@dataclass(frozen=True)
class Listing:
    """Lines of code with remarks."""

    title: str
    lines: Sequence[Line]
    note: str = ""


Block = Table | Figure | HeatMap | Verdicts | Facts | Bars | Listing | str


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it; a plain ``str`` block is a paragraph. ``detail``: too long for a terminal."""

    title: str
    blocks: Sequence[Block]
    detail: bool = False


@dataclass(frozen=True)
class Report:
    """A whole report. ``lead`` is the sentence a reader needs when they read nothing else."""

    title: str
    lead: str
    sections: Sequence[Section] = field(default_factory=tuple)

    def figures(self) -> list[Figure]:
        """Every figure, in order."""
        return [block for section in self.sections for block in section.blocks if isinstance(block, Figure)]
