"""What the quantizers of all formats share. Legend: P slots of the frame, T tiles of 128 slots, G groups."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from blockscale.layouts import TileMap
from blockscale.tensors.arrange import Logical

Planes = tuple[Logical | None, Logical | None]


def block_amax(magnitude: Tensor, nan: str) -> Tensor:
    """Largest magnitude over the last dimension; a NaN wins ("propagate") or counts as 0 ("ignore")."""
    if nan == "ignore":
        magnitude = magnitude.nan_to_num(nan=0.0, posinf=torch.inf)
    return magnitude.amax(-1) if magnitude.numel() else magnitude.new_zeros(magnitude.shape[:-1])


def group_amax(frame: Tensor, tiles: TileMap) -> Tensor:
    """float32 (G,): the largest magnitude of each group, NaNs left out; 0 for nothing. ``frame``: (P or T, ...)."""
    per_tile = block_amax(frame.abs().reshape(tiles.num_tiles, frame.numel() // max(tiles.num_tiles, 1)), "ignore")
    result = per_tile.new_zeros(tiles.num_groups + 1)
    return result.scatter_reduce_(0, tiles.group, per_tile, "amax")[:-1]


def column_amax(x_TKBv: Tensor, tiles: TileMap) -> Tensor:
    """float32 (G, K): the largest magnitude of each column of each group, NaNs left out; 0 for nothing."""
    per_tile = block_amax(x_TKBv.abs().flatten(2), "ignore")
    result = per_tile.new_zeros((tiles.num_groups + 1, per_tile.shape[1]))
    return result.scatter_reduce_(0, tiles.group[:, None].expand_as(per_tile), per_tile, "amax")[:-1]


def of_tile(per_group: Tensor, tiles: TileMap) -> Tensor:
    """(G,) -> (T,); 0 for a tile that no group uses."""
    return F.pad(per_group, (0, 1))[tiles.group]
