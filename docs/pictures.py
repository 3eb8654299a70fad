"""Draw the pictures of the documentation as SVG: value grids, blocks, the 128x4 tile and the frame of grouped tensors.

What is drawn comes from blockscale: grids from its decoders, byte numbers from ``blockscale.layouts``.

    python docs/pictures.py [FOLDER]     by default docs/pictures
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

import blockscale as bs
from blockscale.formats.elements import decode
from blockscale.layouts import TileMap

BLUE, ORANGE, GREY, PALE = "#3b6fb6", "#e07b28", "#777777", "#dfe8f3"
BANDS = (BLUE, "#b8611a", "#3f8a50", "#8a5fb0")
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "blockscale", "font.family": "sans-serif", "font.size": 9}


def _axes(width: float, height: float, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    figure.patch.set_facecolor("white")
    axes = figure.subplots(rows, columns, squeeze=False)
    return figure, list(axes.flat)


def values(element: str) -> list[float]:
    """The finite values >= 0 of an element type, ascending."""
    codes = torch.arange(16 if element == "e2m1" else 256, dtype=torch.uint8)
    decoded = decode(codes, element)
    return sorted({abs(v) for v in decoded[decoded.isfinite()].tolist()})


def grid(elements: tuple[str, ...]) -> Figure:
    """Each value of an element type as a line, on a log scale for 8 bits and a linear one for 4."""
    figure, axes = _axes(7.5, 1.15 * len(elements) + 0.25, len(elements))
    for ax, element in zip(axes, elements, strict=True):
        shown = values(element)
        ax.vlines(shown if element == "e2m1" else shown[1:], 0, 1, color=BLUE, linewidth=2 if element == "e2m1" else 0.7)
        if element == "e2m1":
            ax.set_xticks(shown, [f"{v:g}" for v in shown])
        else:
            ax.set_xscale("log", base=2)
            subnormal = shown[4 if element == "e5m2" else 8]
            ax.axvspan(shown[1] / 1.3, subnormal / 1.05, color=PALE)
            ticks = [shown[1], subnormal, 1.0, shown[-1]]
            ax.set_xticks(ticks, [f"2^{t:.0f}" for t in torch.tensor(ticks[:2]).log2().tolist()] + ["1", f"{shown[-1]:g}"])
            ax.minorticks_off()
        ax.set_title(
            f"{element.upper()}: {len(shown)} values from 0 to {shown[-1]:g}; the same with a minus sign", loc="left", fontsize=9
        )
        ax.set_yticks([])
        for side in ("left", "right", "top"):
            ax.spines[side].set_visible(False)
    return figure


def block(rows: int, columns: int, planes: dict[str, tuple[int, int]], note: str = "") -> Figure:
    """A corner of a matrix once a plane, cut into its blocks, the first one marked; 16 rows or columns of blocks 1 thin."""
    figure, axes = _axes(7.5, 2.7, 1, len(planes))
    for ax, (title, (high, wide)) in zip(axes, planes.items(), strict=True):
        shown = (16 if high == 1 else rows, 16 if wide == 1 else columns)
        corners = [(left, top) for top in range(0, shown[0], high) for left in range(0, shown[1], wide)]
        for left, top in corners:
            odd = (left // wide + top // high) % 2
            face = ORANGE if left == top == 0 else PALE if odd else "white"
            ax.add_patch(Rectangle((left, top), wide, high, facecolor=face, edgecolor=BLUE, linewidth=0.6))
        ax.set_xlim(0, shown[1])
        ax.set_ylim(shown[0], 0)
        ax.set_title(title, fontsize=9)
        ax.set_xticks(range(0, shown[1] + 1, max(wide, shown[1] // 4)))
        ax.set_yticks(range(0, shown[0] + 1, max(high, shown[0] // 4)))
        ax.tick_params(length=2, labelsize=8)
        ax.set_xlabel(f"column (orange: {high} x {wide}, one scale)", fontsize=8)
    axes[0].set_ylabel("row", fontsize=8)
    if note:
        figure.suptitle(note, fontsize=9, color=GREY)
    return figure


def swizzle() -> Figure:
    """One 128x4 tile: the byte of each scale on the left, the scales of each 16 bytes on the right."""
    number = torch.arange(512).view(128, 4)
    flat = bs.layouts.swizzle(number)
    where = torch.empty(512, dtype=torch.int64)
    where[flat] = torch.arange(512)  # a scale's place in the flat buffer
    figure, (left, right) = _axes(7.5, 4.8, 1, 2)
    rows = [0, 1, 2, 31, 32, 33, 34, 63, 64, 65, 66, 95, 96, 97, 98, 127]
    for y, row in enumerate(rows):
        for column in range(4):
            place = int(where[row * 4 + column])
            left.add_patch(Rectangle((column, y), 1, 1, facecolor=BANDS[row // 32], edgecolor="white"))
            left.text(column + 0.5, y + 0.5, str(place), ha="center", va="center", color="white", fontsize=8)
    left.set_xticks([c + 0.5 for c in range(4)], [f"block {c}" for c in range(4)])
    left.set_yticks([y + 0.5 for y in range(len(rows))], [f"row {r}" for r in rows])
    left.set_title("The byte of each scale", fontsize=9)

    lines = [0, 1, 2, 3, 30, 31]
    for y, line in enumerate(lines):
        for x in range(4):
            row = int(flat[16 * line + 4 * x]) // 4
            right.add_patch(Rectangle((x, y), 1, 1, facecolor=BANDS[row // 32], edgecolor="white"))
            right.text(x + 0.5, y + 0.5, f"row {row}", ha="center", va="center", color="white", fontsize=8)
    right.set_xticks([x + 0.5 for x in range(4)], [f"+{4 * x}" for x in range(4)])
    right.set_yticks([y + 0.5 for y in range(len(lines))], [f"byte {16 * n}" for n in lines])
    right.set_title("Memory: 4 scales, blocks 0 to 3, in each cell", fontsize=9)
    for ax, count in ((left, len(rows)), (right, len(lines))):
        ax.set_xlim(0, 4)
        ax.set_ylim(count, 0)
        ax.xaxis.tick_top()
        ax.tick_params(length=0, labelsize=8)
        for side in ax.spines.values():
            side.set_visible(False)
    return figure


def frame(sizes: tuple[int, ...], capacity: int) -> Figure:
    """Packed rows of a grouped tensor, and the same rows in tiles of 128."""
    offsets = bs.offsets_from_sizes(torch.tensor(sizes))
    tiles = TileMap(offsets, capacity)
    figure, (ax,) = _axes(7.5, 2.4)
    total = 128 * tiles.num_tiles
    for y, width in ((0, capacity), (2, total)):
        ax.add_patch(Rectangle((0, y), width, 1, facecolor="#eeeeee", edgecolor=GREY, linewidth=0.6))
    for g, (start, size) in enumerate(zip(offsets.tolist(), sizes, strict=False)):
        place = 128 * int(tiles.tile_start[g])
        colour = BANDS[g % 4]
        for x, y in ((start, 0), (place, 2)):
            ax.add_patch(Rectangle((x, y), size, 1, facecolor=colour, edgecolor="white"))
            if size:
                ax.text(x + size / 2, y + 0.5, f"{g}:\n{size}", ha="center", va="center", color="white", fontsize=8)
    for tile in range(tiles.num_tiles + 1):
        ax.plot([128 * tile] * 2, [1.8, 3.2], color="black", linewidth=0.7)
    ax.set_xlim(-5, total + 5)
    ax.set_ylim(3.4, -0.3)
    ax.set_yticks([0.5, 2.5], [f"rows\n(capacity {capacity})", f"tiles of 128\n({tiles.num_tiles})"])
    ax.set_xticks([])
    for side in ax.spines.values():
        side.set_visible(False)
    names = ", ".join(map(str, sizes))
    ax.set_title(f"Groups of {names} rows (group: rows). Grey: dead rows and padding, always zero", fontsize=9)
    return figure


def pictures() -> dict[str, Figure]:
    """All pictures by file name without ending."""
    row, column = "rowwise plane", "columnwise plane"
    return {
        "grid_fp8": grid(("e4m3", "e5m2")),
        "grid_fp4": grid(("e2m1",)),
        "grid_fp4_scales": grid(("e2m1", "e4m3")),
        "block_mxfp8": block(64, 64, {f"{row}, 1x32": (1, 32), f"{column}, 1x32": (32, 1), "both planes, 32x32": (32, 32)}),
        "block_mxfp4": block(64, 64, {f"{row}, 1x32": (1, 32), f"{column}, 1x32": (32, 1), "both planes, 32x32": (32, 32)}),
        "block_nvfp4": block(
            64,
            64,
            {f"{row}, 1x16": (1, 16), f"{column}, 1x16": (16, 1), "both planes, 16x16": (16, 16)},
            "and one float32 scale for the whole tensor or group",
        ),
        "block_fp8_tensor": block(64, 64, {f"{row}": (64, 64), f"{column}": (64, 64)}),
        "block_fp8_block": block(
            256, 256, {f"{row}, 1x128": (1, 128), f"{column}, 1x128": (128, 1), "both planes, 128x128": (128, 128)}
        ),
        "block_hybrid": block(64, 64, {f"{row}: NVFP4, 1x16": (1, 16), f"{column}: MXFP8, 1x32": (32, 1)}),
        "swizzle": swizzle(),
        "frame": frame((100, 0, 33, 167), 384),
    }


def draw(folder: Path) -> list[Path]:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        written = []
        for name, figure in pictures().items():
            path = folder / f"{name}.svg"
            figure.savefig(path, metadata={"Date": None, "Creator": None})
            written.append(path)
    return written


if __name__ == "__main__":
    for made in draw(Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent / "pictures"):
        print(made)
