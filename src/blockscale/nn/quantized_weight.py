"""A weight that exists only in quantized form: made, filled and read a group at a time.

Legend: N outputs, K inputs, G groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.formats import Format
from blockscale.ops import checks
from blockscale.ops.quantize import check_options, fake_grouped, quantize_grouped
from blockscale.ops.stages import LAYOUT
from blockscale.tensors import GroupedTensor, Plane

_PARTS = ("data", "scale", "amax")
_FORMAT = "_extra_state"


class QuantizedWeight(nn.Module):
    """The planes of a weight (G, N, K) as buffers; no high-precision copy of more than one group is ever made.

    Zero at first, on the meta device without memory. The state dict holds ``rowwise_data``, ``rowwise_scale``,
    ``rowwise_amax`` (formats with a global scale), the same for ``columnwise``, and the format as bytes of text, so that
    a state of another format is refused. Conversions such as ``.half()`` move the buffers but leave their dtypes.

    Args:
        num_groups, out_features, in_features: G, N, K.
        format: of both planes.
        columnwise: hold the columnwise plane too, which the gradient of the input needs.
        device: of the buffers.
    """

    def __init__(
        self,
        num_groups: int,
        out_features: int,
        in_features: int,
        format: Format,
        columnwise: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        check_options(format, True, columnwise, LAYOUT, (LAYOUT,))
        self.shape = (num_groups, out_features, in_features)
        self.format, self.columnwise = format, columnwise
        for name, like in self._empty(num_groups, torch.empty(0, device="meta")).items():
            there = like.numel() > 0 or not name.endswith("amax")
            buffer = torch.zeros(like.shape, dtype=like.dtype, device=device) if there else None
            self.register_buffer(name, buffer)

    def _empty(self, groups: int, like: Tensor) -> dict[str, Tensor]:
        """What the planes of some groups look like, by the buffers' names."""
        _, N, K = self.shape
        planes = ("rowwise", "columnwise") if self.columnwise else ("rowwise",)
        tensors = fake_grouped(like, groups * N, K, groups, self.format, True, self.columnwise, LAYOUT)
        return dict(zip((f"{plane}_{part}" for plane in planes for part in _PARTS), tensors, strict=True))

    def _group(self, index: int) -> dict[str, Tensor]:
        """Views of one group's part of each buffer, shaped as those of a tensor of this group alone.

        A group's bytes lie together in every buffer, and each group of N rows has as many.
        """
        if not 0 <= index < self.shape[0]:
            raise IndexError(f"index={index} is not a group; legal are 0..{self.shape[0] - 1}")
        views = {}
        for name, like in self._empty(1, torch.empty(0, device="meta")).items():
            buffer = getattr(self, name)
            if buffer is not None:
                n = like.numel()
                views[name] = buffer.view(-1)[index * n : (index + 1) * n].view(like.shape)
        return views

    def _tensor(self, buffers: dict[str, Tensor], groups: int) -> GroupedTensor:
        _, N, K = self.shape
        planes: dict[str, Plane | None] = {"rowwise": None, "columnwise": None}
        for plane in ("rowwise", "columnwise")[: 1 + self.columnwise]:
            data, scale, amax = (buffers.get(f"{plane}_{part}") for part in _PARTS)
            assert data is not None
            assert scale is not None
            planes[plane] = Plane(data, scale, amax, LAYOUT)
        offsets = torch.arange(groups + 1, device=self.rowwise_data.device) * N
        return GroupedTensor((groups * N, K), self.format, planes["rowwise"], planes["columnwise"], offsets, N)

    rowwise_data: Tensor

    def tensor(self) -> GroupedTensor:
        """The weight as the grouped operators take it; it shares the buffers' memory."""
        return self._tensor(dict(self.named_buffers()), self.shape[0])

    def group(self, index: int) -> GroupedTensor:
        """One group's weight (N, K), a tensor of one group that shares the buffers' memory.

        Raises:
            IndexError: index outside 0..G-1.
        """
        return self._tensor(self._group(index), 1)

    def set_group(self, index: int, w_NK: Tensor) -> None:
        """Quantize w (N, K), any float dtype and device, into a group: the bits that quantizing all groups at once gives.

        Raises:
            IndexError: index outside 0..G-1. TypeError, ValueError: w.
        """
        views = self._group(index)
        checks.shape("w", checks.dtype("w", w_NK, checks.FLOATS), self.shape[1:], "one group's (outputs, inputs)")
        with torch.no_grad():
            q = quantize_grouped(w_NK[None].to(self.rowwise_data.device), None, self.format, columnwise=self.columnwise)
            for plane, p in q.planes.items():
                for part in _PARTS:
                    if f"{plane}_{part}" in views:
                        views[f"{plane}_{part}"].copy_(getattr(p, part))

    def fill(self, group: Callable[[int], Tensor]) -> None:
        """Quantize ``group(g)``, (N, K), into each group g in turn."""
        for g in range(self.shape[0]):
            self.set_group(g, group(g))

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values (G, N, K) of the rowwise plane, which the forward product reads. All of them: the whole weight."""
        return self.tensor().dequantize(dtype).view(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        return sum(t.nbytes for t in self.buffers())

    def get_extra_state(self) -> Tensor:
        """The format's text as bytes."""
        return torch.tensor(list(self.format.spec().encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Nothing is left to do: ``_load_from_state_dict`` compared it."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        stored = state_dict.get(prefix + _FORMAT)
        if stored is not None and bytes(stored.tolist()).decode() != self.format.spec():
            spec = bytes(stored.tolist()).decode()
            raise ValueError(f"{prefix.removesuffix('.')} is {spec} in the state dict; this layer holds {self.format.spec()}")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedWeight:
        def move(t: Tensor) -> Tensor:
            moved = fn(t)
            return moved if moved.dtype == t.dtype else t.to(moved.device)

        super()._apply(move, recurse)
        return self

    def extra_repr(self) -> str:
        """Shape and format."""
        planes = "both planes" if self.columnwise else "rowwise plane"
        return f"{self.shape[0]} x {self.shape[1]} x {self.shape[2]}, {self.format.spec()}, {planes}"
