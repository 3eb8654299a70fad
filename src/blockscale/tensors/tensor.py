"""Quantized tensors: plain dataclasses of planes and extents, nothing else.

Legend: M rows, K columns, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.formats import Format
from blockscale.layouts import PLANES, GroupExtent, TileMap, offsets_from_sizes
from blockscale.tensors.arrange import (
    Logical,
    place_amax,
    place_grouped,
    place_plain,
    restore_amax,
    restore_grouped,
    restore_plain,
)


@dataclass(frozen=True, eq=False)
class Plane:
    """One quantized plane.

    Attributes:
        data: uint8 element codes (E2M1: two a byte).
        scale: the decode scale: uint8 E8M0 or E4M3 codes, or float32.
        amax: float32 [1] or [G] for the formats with a global scale, else None. Row-scaled: rowwise [M] or [capacity],
            columnwise [K] or [G, K].
        layout: arrangement of ``scale``: "compact", "swizzled", "swizzled_8x4" or "linear".
    """

    data: Tensor
    scale: Tensor
    amax: Tensor | None
    layout: str

    def tensors(self) -> list[Tensor]:
        """data, scale and amax (when there is one)."""
        return [t for t in (self.data, self.scale, self.amax) if t is not None]

    def map(self, f: Callable[[Tensor], Tensor]) -> Plane:
        """The same plane with ``f`` applied to each tensor."""
        amax = None if self.amax is None else f(self.amax)
        return replace(self, data=f(self.data), scale=f(self.scale), amax=amax)


def planes_from_list(tensors: list[Tensor], fmt: Format, rowwise: bool, columnwise: bool, layout: str) -> list[Plane | None]:
    """[rowwise, columnwise] planes from an operator's list (data, scale, amax a plane)."""
    source = iter(tensors)
    planes: list[Plane | None] = []
    for name, asked in zip(PLANES, (rowwise, columnwise), strict=True):
        if asked:
            data, scale, amax = next(source), next(source), next(source)
            planes.append(Plane(data, scale, amax if fmt.of(name).has_amax else None, layout))
        else:
            planes.append(None)
    return planes


@dataclass(frozen=True, eq=False)
class _Quantized:
    shape: tuple[int, int]
    format: Format
    rowwise: Plane | None
    columnwise: Plane | None

    def plane(self, name: str) -> Plane:
        """The plane called "rowwise" or "columnwise"; ``ValueError`` when it was not asked for at quantization."""
        if name not in PLANES:
            raise ValueError(f"plane={name!r} is not one of {PLANES}")
        found: Plane | None = getattr(self, name)
        if found is None:
            raise ValueError(f"plane={name!r} is absent: it was quantized with {name}=False")
        return found

    @property
    def planes(self) -> dict[str, Plane]:
        """The planes that are there, by name."""
        return {name: p for name in PLANES if (p := getattr(self, name)) is not None}

    @property
    def device(self) -> torch.device:
        """Device of the planes."""
        return next(iter(self.planes.values())).data.device

    def dequantize(self, dtype: torch.dtype = torch.float32, plane: str = "rowwise") -> Tensor:
        """(M, K) values of a plane, computed in float32 and rounded once to ``dtype``; a grouped tensor's dead rows are zero.

        The operator ``blockscale::dequantize``: a kernel on a GPU, one launch for all groups, else plain torch.
        """
        p, fmt, offsets = self.plane(plane), self.format.stored(plane), getattr(self, "offsets", None)
        args = (p.data, p.scale, p.amax, offsets, *self.shape, fmt.spec(), plane, p.layout, dtype)
        values: Tensor = torch.ops.blockscale.dequantize(*args)
        return values

    @property
    def nbytes(self) -> int:
        """Bytes of all planes: data, scales and amax."""
        return sum(t.nbytes for p in self.planes.values() for t in p.tensors())

    def _describe(self, extra: str) -> str:
        parts = [f"{self.shape[0]} x {self.shape[1]}{extra}", self.format.spec()]
        for name, p in self.planes.items():
            scale = f"scale {tuple(p.scale.shape)} {str(p.scale.dtype).removeprefix('torch.')} {p.layout}"
            parts.append(f"{name}: data {tuple(p.data.shape)} uint8, {scale}")
        parts.append(f"{self.nbytes:,} bytes on {self.device}")
        return f"{type(self).__name__}({'; '.join(parts)})"


AnyTensor = TypeVar("AnyTensor", bound=_Quantized)


@dataclass(frozen=True, eq=False, repr=False)
class BlockScaledTensor(_Quantized):
    """A quantized (M, K) matrix.

    Attributes:
        shape: (M, K) of the matrix that was quantized.
        format: its format.
        rowwise, columnwise: the planes (blocks along K; blocks along M), None when not asked for.
        extent: where it lay in a grouped tensor, when it was taken out of one.
    """

    extent: GroupExtent | None = None

    def __repr__(self) -> str:
        return self._describe("")

    def to(self, device: torch.device | str) -> BlockScaledTensor:
        """The same tensor on ``device``."""
        target = torch.device(device)
        return _map(self, lambda t: t.to(target))

    def logical(self, plane: str = "rowwise") -> Logical:
        """The plane without its arrangement (see ``tensors.arrange.Logical``)."""
        p = self.plane(plane)
        restored = restore_plain(p.data, p.scale, self.format.of(plane), plane, p.layout, self.shape)
        return replace(restored, amax=restore_amax(p.amax, self.format.of(plane), plane, self.tiles, self.shape[1]))

    def with_layout(self, layout: str) -> BlockScaledTensor:
        """The same tensor with its scales in another layout."""
        planes: dict[str, Plane] = {}
        for name, p in self.planes.items():
            data, scale = place_plain(self.logical(name), self.format.of(name), name, layout, self.shape)
            planes[name] = Plane(data, scale, p.amax, layout)
        return replace(self, **planes)  # type: ignore[arg-type]

    @property
    def tiles(self) -> TileMap:
        """The tiles of one group of all rows."""
        return TileMap(torch.tensor([0, self.shape[0]], device=self.device), self.shape[0])


@dataclass(frozen=True, eq=False, repr=False)
class GroupedTensor(_Quantized):
    """Quantized rows of G groups in one buffer.

    Attributes:
        shape: (capacity, K); rows past ``offsets[-1]`` are dead: zero, and never read.
        format: the format of every group.
        rowwise, columnwise: the planes, None when not asked for.
        offsets: int64[G+1] on the device: group g owns rows offsets[g]..offsets[g+1]. The one extent of this tensor.
        matrix_rows: N when the groups are the matrices of weights (G, N, K), else None.
    """

    offsets: Tensor
    matrix_rows: int | None = None

    @property
    def num_groups(self) -> int:
        """G."""
        return self.offsets.numel() - 1

    @property
    def capacity(self) -> int:
        """Rows of the buffer."""
        return self.shape[0]

    @property
    def tiles(self) -> TileMap:
        """Where the rows lie in tiles of 128."""
        return TileMap(self.offsets, self.capacity)

    def __repr__(self) -> str:
        return self._describe(f" in {self.num_groups} groups")

    def to(self, device: torch.device | str) -> GroupedTensor:
        """The same tensor on ``device``."""
        target = torch.device(device)
        return replace(_map(self, lambda t: t.to(target)), offsets=self.offsets.to(target))

    def logical(self, plane: str = "rowwise") -> Logical:
        """The plane without its arrangement (see ``tensors.arrange.Logical``)."""
        p = self.plane(plane)
        tiles, K = self.tiles, self.shape[1]
        restored = restore_grouped(p.data, p.scale, self.format.of(plane), plane, p.layout, tiles, K)
        return replace(restored, amax=restore_amax(p.amax, self.format.of(plane), plane, tiles, K))

    def with_layout(self, layout: str) -> GroupedTensor:
        """The same tensor with its scales in another layout ("compact" or "swizzled")."""
        planes: dict[str, Plane] = {}
        for name, p in self.planes.items():
            data, scale = place_grouped(self.logical(name), self.format.of(name), name, layout, self.tiles)
            planes[name] = Plane(data, scale, p.amax, layout)
        return replace(self, **planes)  # type: ignore[arg-type]

    def group(self, index: int, layout: str = "compact") -> BlockScaledTensor:
        """One group as a tensor of its own (a copy), equal to ``quantize`` of its rows. Reads the offsets: a sync on a GPU.

        Raises:
            IndexError: index outside 0..G-1.
        """
        if not 0 <= index < self.num_groups:
            raise IndexError(f"index={index} is not a group; legal are 0..{self.num_groups - 1}")
        extent = self.tiles.extent(index)
        shape = (extent.rows, self.shape[1])
        planes: dict[str, Plane | None] = {"rowwise": None, "columnwise": None}
        for name in self.planes:
            logical = _cut(self.logical(name), self.format.of(name), name, extent, self.tiles.num_tiles, index)
            data, scale = place_plain(logical, self.format.of(name), name, layout, shape)
            planes[name] = Plane(data, scale, logical.amax, layout)
        return BlockScaledTensor(shape, self.format, planes["rowwise"], planes["columnwise"], extent)

    def to_padded(self, alignment: int) -> GroupedTensor:
        """Each group's rows padded to a multiple of ``alignment``: the layout that other libraries exchange.

        Padding rows are zero, their scales code 0. The result's offsets are the padded ones; keep ``self.offsets`` for
        :meth:`from_padded`. Capacity grows to hold any sizes: no sync.

        Raises:
            ValueError: alignment not one of 32, 64, 128, 256.
        """
        if alignment not in (32, 64, 128, 256):
            raise ValueError(f"alignment={alignment} is not one of 32, 64, 128, 256")
        padded = offsets_from_sizes((self.offsets.diff() + alignment - 1) // alignment * alignment)
        capacity = self.capacity + (alignment - 1) * min(self.num_groups, self.capacity)
        return self._move(padded, capacity)

    def from_padded(self, offsets: Tensor, capacity: int) -> GroupedTensor:
        """Inverse of :meth:`to_padded`: keep the first ``offsets.diff()[g]`` rows of each group."""
        return self._move(offsets, capacity)

    def _move(self, offsets: Tensor, capacity: int) -> GroupedTensor:
        old, new = self.tiles, TileMap(offsets, capacity)
        planes: dict[str, Plane] = {}
        for name, p in self.planes.items():
            logical = _retile(self.logical(name), self.format.of(name), name, old, new)
            amax = place_amax(logical.amax, self.format.of(name), name, new)
            planes[name] = Plane(*place_grouped(logical, self.format.of(name), name, p.layout, new), amax, p.layout)
        return GroupedTensor((capacity, self.shape[1]), self.format, planes.get("rowwise"), planes.get("columnwise"), offsets)


def _map(tensor: AnyTensor, f: Callable[[Tensor], Tensor]) -> AnyTensor:
    return replace(tensor, **{name: p.map(f) for name, p in tensor.planes.items()})  # type: ignore[arg-type]


def _cut(logical: Logical, fmt: Format, which: str, extent: GroupExtent, tiles: int, index: int) -> Logical:
    """The tiles of one group; its amax as a plain tensor keeps it."""

    def cut(x: Tensor) -> Tensor:
        per_tile = x.shape[0] // max(tiles, 1)
        return x[extent.tile_start * per_tile : (extent.tile_start + extent.pitch) * per_tile]

    def own(x: Tensor | None) -> Tensor | None:
        return None if x is None else x[index : index + 1].clone()

    scale = logical.scale[index : index + 1].clone() if fmt.per_tensor else cut(logical.scale)
    if logical.amax is not None and fmt.scales_rows:
        amax = cut(logical.amax)[: extent.rows].clone() if which == "rowwise" else logical.amax[index].clone()
        return Logical(cut(logical.data), scale, amax)
    return Logical(cut(logical.data), scale, own(logical.amax))


def _retile(logical: Logical, fmt: Format, which: str, old: TileMap, new: TileMap) -> Logical:
    """The same groups in a frame of other sizes; tiles that were not there are zero."""
    count = F.pad(old.tile_start.diff(), (0, 1))[new.group]
    index = torch.where(new.local < count, old.tile_start[new.group] + new.local, -1)

    def move(x: Tensor) -> Tensor:
        per_tile = x.shape[0] // max(old.num_tiles, 1)
        tiles = x.reshape(old.num_tiles, per_tile, *x.shape[1:])
        if old.num_tiles == 0:
            return x.new_zeros((new.num_tiles * per_tile, *x.shape[1:]))
        moved = tiles[index.clamp(min=0)].masked_fill_((index < 0).view(-1, *(1,) * x.dim()), 0)
        return moved.flatten(0, 1)

    scale = logical.scale if fmt.per_tensor else move(logical.scale)
    by_row = logical.amax is not None and fmt.scales_rows and which == "rowwise"
    return Logical(move(logical.data), scale, move(logical.amax) if by_row and logical.amax is not None else logical.amax)
