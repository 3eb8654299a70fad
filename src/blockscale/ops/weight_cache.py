"""Quantized weights kept until the weight changes: the microbatches of a step share one quantization."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockscale.formats import Format
from blockscale.ops import stages, tickets
from blockscale.tensors import GroupedTensor

_optimizer_steps = 0


def _count_step(optimizer: object, args: object, kwargs: object) -> None:
    global _optimizer_steps
    _optimizer_steps += 1


@cache
def _watch_optimizers() -> None:
    """Count the steps of all torch optimizers: the fused ones change parameters behind the version counter's back."""
    register_optimizer_step_post_hook(_count_step)


class WeightCache(tickets.Ticketed):
    """The quantized planes of one weight, and the state of the weight that they belong to.

    The state is the storage (told by a weak reference, so that a new one at the same address is another), torch's version
    counter, the number of optimizer steps taken in the process (fused optimizers do not count versions), and shape,
    strides, offset and dtype. Steps of any torch optimizer, ``load_state_dict``, ``copy_``, ``.to()`` and assignments to
    ``.data`` or to the parameter all change it. What torch does not count does not: writing in place *through*
    ``weight.data`` (``weight.data.add_(...)``) or from a kernel of your own; call :meth:`clear` then.
    An inference tensor has no version: it is quantized anew at every call.

    Attributes:
        hits, misses: how many times a plane was reused, how many times it was made.
    """

    def __init__(self) -> None:
        super().__init__()
        _watch_optimizers()
        self.hits = self.misses = 0
        self._state: tuple[Any, ...] | None = None
        self._planes: dict[tuple[str, str], GroupedTensor] = {}

    @property
    def nbytes(self) -> int:
        """Bytes of the planes that are kept now."""
        return sum(q.nbytes for q in self._planes.values())

    def clear(self) -> None:
        """Forget the planes; the counters stay."""
        self._state = None
        self._planes.clear()

    def get(self, w_GNK: Tensor, fmt: Format, plane: str, scale: Tensor | None = None) -> GroupedTensor:
        """The weight quantized in one plane, from here if the weight (and the ``scale`` of a delayed format) is what it was."""
        if w_GNK.is_inference():
            return quantize(w_GNK, fmt, plane, scale)
        state = _state_of(w_GNK), None if scale is None else _state_of(scale)
        if state != self._state:
            self.clear()
            self._state = state
        key = (fmt.spec(), plane)
        if key in self._planes:
            self.hits += 1
        else:
            self.misses += 1
            self._planes[key] = quantize(w_GNK, fmt, plane, scale)
        return self._planes[key]


def _state_of(w: Tensor) -> tuple[Any, ...]:
    storage = StorageWeakRef(w.untyped_storage())
    return storage, w._version, _optimizer_steps, w.storage_offset(), tuple(w.shape), w.stride(), w.dtype


def quantize(w_GNK: Tensor, fmt: Format, plane: str, scale: Tensor | None = None) -> GroupedTensor:
    """``stages.quantize_weight`` for a format that is there."""
    q = stages.quantize_weight(w_GNK, fmt, plane, scale)
    assert isinstance(q, GroupedTensor)
    return q


def weight_operand(
    w_GNK: Tensor, fmt: Format | None, plane: str, ticket: Tensor | None, scale: Tensor | None = None
) -> stages.Operand:
    """A weight as the GEMMs take it: itself without a format, else quantized, through the cache of a ticket if given."""
    if fmt is None:
        return w_GNK
    if ticket is None:
        return quantize(w_GNK, fmt, plane, scale)
    return tickets.find(ticket, WeightCache).get(w_GNK, fmt, plane, scale)
