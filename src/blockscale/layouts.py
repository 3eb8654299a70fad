"""Where scales and transposed data lie in memory, in both directions, for plain and grouped tensors.

Legend: M rows, K contraction, G groups, V block length; i the non-contracted index, j the block index along the
contraction; T(g) = tiles of 128 rows before group g, t_g = tiles of group g.

128x4 tiles (what block-scaled tensor cores read)::

    offset(i, j) = ((i // 128) * nT + j // 4) * 512 + (i % 32) * 16 + ((i % 128) // 32) * 4 + j % 4,   nT = ceil(blocks / 4)

8x4 tiles (small-batch inference kernels)::

    offset(m, k) = (m // 8) * (kT * 32) + (k // 4) * 32 + (m % 8) * 4 + k % 4,   kT = ceil(blocks / 4)

Every padding byte is zero. Source: the cuBLAS documentation of the 1D block scaling factors layout; TensorRT-LLM (8x4).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 128
LAYOUTS = ("compact", "swizzled", "swizzled_8x4", "linear")
PLANES = ("rowwise", "columnwise")


def ceil_div(a: int, b: int) -> int:
    """``a / b`` rounded up."""
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    """The smallest multiple of ``b`` that is at least ``a``."""
    return ceil_div(a, b) * b


def _contraction_last(scale: Tensor, plane: str) -> Tensor:
    if plane not in PLANES:
        raise ValueError(f"plane={plane!r} is not one of {PLANES}")
    if scale.dim() != 2:
        raise ValueError(f"scale has shape {tuple(scale.shape)}; a 2-D array of block scales is needed")
    return scale if plane == "rowwise" else scale.mT


def _pad(scale: Tensor, rows: int, columns: int) -> Tensor:
    r, c = scale.shape
    return F.pad(scale, (0, round_up(c, columns) - c, 0, round_up(r, rows) - r))


def _to_tiles(scale: Tensor, rows: int, bands: int) -> Tensor:
    padded = _pad(scale, rows, 4)
    r, c = padded.shape
    return padded.reshape(r // rows, bands, rows // bands, c // 4, 4).permute(0, 3, 2, 1, 4).flatten()


def _from_tiles(flat: Tensor, shape: tuple[int, int], rows: int, bands: int, plane: str) -> Tensor:
    r, c = shape if plane == "rowwise" else shape[::-1]
    padded_r, padded_c = round_up(r, rows), round_up(c, 4)
    if flat.numel() != padded_r * padded_c:
        raise ValueError(f"flat has {flat.numel()} elements; shape={tuple(shape)} in the {plane} plane needs {padded_r * padded_c}")
    tiles = flat.reshape(padded_r // rows, padded_c // 4, rows // bands, bands, 4)
    scale = tiles.permute(0, 3, 2, 1, 4).reshape(padded_r, padded_c)[:r, :c]
    return _contraction_last(scale, plane).contiguous()


def swizzle(scale: Tensor, plane: str = "rowwise") -> Tensor:
    """Block scales into 128x4 tiles.

    Args:
        scale: 2-D, compact or linear. Rowwise: (M, blocks along K). Columnwise (MXFP8): (blocks along M, K).
            A transposed plane (NVFP4 columnwise) is a rowwise one here.
        plane: "rowwise" or "columnwise".

    Returns:
        flat, ``roundup(i, 128) * roundup(j, 4)`` elements, padding zero.
    """
    return _to_tiles(_contraction_last(scale, plane), TILE, 4)


def unswizzle(flat: Tensor, shape: tuple[int, int], plane: str = "rowwise") -> Tensor:
    """Inverse of :func:`swizzle`; ``shape`` is that of the 2-D array wanted (compact or linear)."""
    return _from_tiles(flat, shape, TILE, 4, plane)


def swizzle_8x4(scale: Tensor, plane: str = "rowwise") -> Tensor:
    """Block scales into 8x4 tiles: flat, ``roundup(i, 8) * roundup(j, 4)`` elements, padding zero."""
    return _to_tiles(_contraction_last(scale, plane), 8, 1)


def unswizzle_8x4(flat: Tensor, shape: tuple[int, int], plane: str = "rowwise") -> Tensor:
    """Inverse of :func:`swizzle_8x4`; ``shape`` is that of the 2-D array wanted."""
    return _from_tiles(flat, shape, 8, 1, plane)


def compact(scale: Tensor, plane: str = "rowwise") -> Tensor:
    """Pad a linear 2-D array of scales with zeros to whole 128x4 tiles (columnwise: 4x128)."""
    _contraction_last(scale, plane)
    return _pad(scale, TILE, 4) if plane == "rowwise" else _pad(scale, 4, TILE)


def arrange(linear: Tensor, layout: str, plane: str = "rowwise") -> Tensor:
    """Bring a linear 2-D array of scales into ``layout``."""
    if layout == "linear":
        return linear.contiguous()
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
    return {"compact": compact, "swizzled": swizzle, "swizzled_8x4": swizzle_8x4}[layout](linear, plane)


def restore(scale: Tensor, layout: str, shape: tuple[int, int], plane: str = "rowwise") -> Tensor:
    """Inverse of :func:`arrange`; ``shape`` is that of the linear array."""
    if layout in ("linear", "compact"):
        return scale[: shape[0], : shape[1]]
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is not one of {LAYOUTS}")
    return (unswizzle if layout == "swizzled" else unswizzle_8x4)(scale, shape, plane)


def offsets_from_sizes(sizes: Tensor) -> Tensor:
    """int64[G+1] row offsets from int[G] group sizes, on the same device, without a sync.

    Worked: sizes [3, 0, 2] -> offsets [0, 3, 3, 5].

    Raises:
        TypeError: sizes not an integer tensor.
        ValueError: sizes not 1-D.
    """
    if not isinstance(sizes, Tensor) or sizes.is_floating_point() or sizes.is_complex() or sizes.dtype == torch.bool:
        kind = sizes.dtype if isinstance(sizes, Tensor) else type(sizes).__name__
        raise TypeError(f"sizes is {kind}; an integer tensor of group sizes is needed")
    if sizes.dim() != 1:
        raise ValueError(f"sizes has shape {tuple(sizes.shape)}; one size a group, shape (G,), is needed")
    return F.pad(torch.cumsum(sizes, 0, dtype=torch.int64), (1, 0))


def tile_capacity(capacity: int, num_groups: int) -> int:
    """Tiles of 128 rows that ``num_groups`` groups of ``capacity`` rows in all can need, whatever their sizes."""
    return (capacity + (TILE - 1) * min(num_groups, capacity)) // TILE


@dataclass(frozen=True)
class GroupExtent:
    """Where one group lies, as host integers: rows, tiles, and the pitch of its columnwise scales.

    ``pitch`` is the number of tiles of 128 rows of the group: nT of MXFP8's swizzled columnwise scales; NVFP4 has
    ``2 * pitch`` tiles and a compact row of ``8 * pitch`` bytes, MXFP4 ``pitch`` tiles and ``4 * pitch`` bytes; their data
    rows have ``64 * pitch`` bytes.
    """

    start: int
    rows: int
    tile_start: int
    pitch: int


class TileMap:
    """The arithmetic of a grouped tensor: which row lies in which slot of the tiles of 128 rows, all on the device.

    A slot is a row of the frame in which each group starts on a tile; there are ``128 * num_tiles`` slots.

    Args:
        offsets: int64[G+1], from 0 to the number of live rows.
        capacity: rows of the buffer, at least ``offsets[-1]``.
    """

    def __init__(self, offsets: Tensor, capacity: int) -> None:
        self.offsets = offsets
        self.capacity = capacity
        self.num_groups = offsets.numel() - 1
        self.num_tiles = tile_capacity(capacity, self.num_groups)

    @cached_property
    def tile_start(self) -> Tensor:
        """int64[G+1]: T(g)."""
        return offsets_from_sizes((self.offsets.diff() + TILE - 1) // TILE)

    @cached_property
    def group(self) -> Tensor:
        """int64[num_tiles]: the group of a tile; G for a tile that no group uses."""
        tile = torch.arange(self.num_tiles, device=self.offsets.device)
        return torch.searchsorted(self.tile_start, tile, right=True) - 1

    @cached_property
    def local(self) -> Tensor:
        """int64[num_tiles]: the tile's index within its group (counted from T(G) for a tile that no group uses)."""
        return torch.arange(self.num_tiles, device=self.offsets.device) - self.tile_start[self.group]

    @cached_property
    def source(self) -> Tensor:
        """int64[128 * num_tiles]: the row that belongs in a slot, -1 for an empty slot."""
        sizes = F.pad(self.offsets.diff(), (0, 1))  # a tile that no group uses belongs to a group of 0 rows
        row = self.local[:, None] * TILE + torch.arange(TILE, device=self.offsets.device)
        return torch.where(row < sizes[self.group][:, None], self.offsets[self.group][:, None] + row, -1).flatten()

    @cached_property
    def live(self) -> Tensor:
        """bool[capacity]: whether a row belongs to a group."""
        return torch.arange(self.capacity, device=self.offsets.device) < self.offsets[-1]

    @cached_property
    def group_of_row(self) -> Tensor:
        """int64[capacity]: the group of a row, G for a dead row."""
        row = torch.arange(self.capacity, device=self.offsets.device)
        return torch.searchsorted(self.offsets, row, right=True) - 1

    @cached_property
    def slot(self) -> Tensor:
        """int64[capacity]: the slot of a row, -1 for a dead row."""
        row = torch.arange(self.capacity, device=self.offsets.device)
        slot = self.tile_start[self.group_of_row] * TILE + row - self.offsets[self.group_of_row]
        return torch.where(self.live, slot, -1)

    def to_frame(self, x: Tensor) -> Tensor:
        """(capacity, ...) -> (128 * num_tiles, ...): each row to its slot, empty slots zero."""
        return _select(x, self.source)

    def to_rows(self, frame: Tensor) -> Tensor:
        """(128 * num_tiles, ...) -> (capacity, ...): inverse of :meth:`to_frame`, dead rows zero."""
        return _select(frame, self.slot)

    @cached_property
    def _pitch(self) -> Tensor:
        tiles = self.tile_start.diff()
        return torch.cat((tiles, tiles.new_ones(1)))[self.group]

    def _interleaved(self, parts: int) -> Tensor:
        """int64[num_tiles, parts]: where part r of a tile goes: ``parts * T(g) + r * t_g + local``."""
        part = torch.arange(parts, device=self.offsets.device)
        tile = torch.arange(self.num_tiles, device=self.offsets.device)[:, None]
        used = parts * (tile - self.local[:, None]) + part * self._pitch[:, None] + self.local[:, None]
        return torch.where((self.group < self.num_groups)[:, None], used, parts * tile + part)

    def interleave(self, tiles: Tensor) -> Tensor:
        """(num_tiles, parts, unit) -> flat, part r of all tiles of a group side by side.

        All grouped columnwise layouts are this one permutation: FP8 data (parts K, unit 128), packed data (K, 64 bytes),
        compact scales (128 Kt, 8 for NVFP4 and 4 for MXFP4), swizzled scales (Kt, 1024 for NVFP4, else 512).
        """
        num_tiles, parts, unit = tiles.shape
        flat = torch.empty((num_tiles * parts, unit), dtype=tiles.dtype, device=tiles.device)
        flat[self._interleaved(parts).flatten()] = tiles.reshape(-1, unit)
        return flat.flatten()

    def deinterleave(self, flat: Tensor, parts: int, unit: int) -> Tensor:
        """Inverse of :meth:`interleave`: flat -> (num_tiles, parts, unit)."""
        return flat.view(-1, unit)[self._interleaved(parts).flatten()].view(self.num_tiles, parts, unit)

    def extent(self, group: int) -> GroupExtent:
        """Where ``group`` lies, as host integers (reads the offsets: a sync when they are on a GPU)."""
        start, end = self.offsets[group : group + 2].tolist()
        tile_start, tile_end = self.tile_start[group : group + 2].tolist()
        return GroupExtent(start, end - start, tile_start, tile_end - tile_start)


def _select(x: Tensor, index: Tensor) -> Tensor:
    """Rows of ``x``; a row of zeros where ``index`` is -1."""
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    padded = F.pad(rows, (0, 0, 0, 1))
    return padded.index_select(0, torch.where(index < 0, x.shape[0], index)).view(index.shape[0], *x.shape[1:])
