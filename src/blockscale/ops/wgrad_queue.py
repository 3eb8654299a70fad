"""Weight gradients put off: backward queues their operands, ``backward_dw()`` multiplies them.

What waits for one microbatch and weight: the columnwise planes of dy and x (bfloat16-operand recipes: dy and x as they are).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from blockscale.ops import stages, tickets
from blockscale.ops.grouped_gemm import grouped_gemm
from blockscale.ops.tap import Tap
from blockscale.tensors import GroupedTensor


@dataclass(frozen=True)
class Waiting:
    """The operands of one weight gradient; ``index`` says of which of the layer's weights."""

    index: int
    dy: stages.Operand
    x: stages.Operand
    offsets: Tensor


def waiting(index: int, dy: stages.Operand, x: stages.Operand, offsets: Tensor) -> Waiting:
    """The operands of a weight gradient, without the rowwise plane of dy, which dgrad has read."""
    return Waiting(index, replace(dy, rowwise=None) if isinstance(dy, GroupedTensor) else dy, x, offsets)


class WgradQueue(tickets.Ticketed):
    """The weight gradients that a layer's backward passes have left, first in, first out."""

    def __init__(self) -> None:
        super().__init__()
        self._microbatches: deque[list[Waiting]] = deque()

    def __len__(self) -> int:
        """Microbatches that wait."""
        return len(self._microbatches)

    @property
    def nbytes(self) -> int:
        """Bytes of the operands that wait."""
        operands = (t for items in self._microbatches for w in items for t in (w.dy, w.x))
        return sum(t.nbytes for t in operands)

    def put(self, items: list[Waiting], copy: bool) -> None:
        """Add a microbatch. ``copy``: the operands lie in memory that others will use again (a compiled graph's)."""
        self._microbatches.append([replace(w, dy=_copied(w.dy), x=_copied(w.x)) for w in items] if copy else items)
        self.ticket[1] += 1

    def run(
        self,
        weights: Sequence[Tensor],
        main_grads: Sequence[Tensor | None],
        microbatches: int | None,
        tap: Tap | None = None,
        roles: Sequence[str] = ("dw",),
    ) -> None:
        """Compute the gradients of the oldest ``microbatches`` (None: all).

        A gradient goes to the weight's ``main_grad`` in float32 if there is one, else through autograd to
        ``weight.grad``, in the weight's dtype: hooks of the weight run (in a compiled graph they ran in backward too, with no
        gradient). ``tap``: of somebody who watches; he is shown the gradients (or the main_grads that they were added
        to) in these roles.

        Raises:
            RuntimeError: nothing waits. ValueError: ``microbatches`` is more than wait, or less than 1.
        """
        if not self._microbatches:
            raise RuntimeError("backward_dw() has nothing to do: no backward pass with delay_wgrad=True came before it")
        count = len(self) if microbatches is None else microbatches
        if not 1 <= count <= len(self):
            raise ValueError(f"microbatches={microbatches} is not legal; {len(self)} wait")
        for _ in range(count):
            for w in self._microbatches.popleft():
                weight, main_grad = weights[w.index], main_grads[w.index]
                if main_grad is not None:
                    grouped_gemm(w.dy, w.x, role="wgrad", offsets=w.offsets, out=_3d(main_grad), accumulate=True)
                    dw = _3d(main_grad)
                else:
                    dw = grouped_gemm(w.dy, w.x, role="wgrad", offsets=w.offsets)
                    torch.autograd.backward([weight], [dw.to(weight.dtype).view(weight.shape)])
                if tap is not None:
                    tap.see_weight(roles[w.index], dw)


def _3d(t: Tensor) -> Tensor:
    return t[None] if t.dim() == 2 else t


def _copied(x: stages.Operand) -> stages.Operand:
    if isinstance(x, Tensor):
        return x.clone()
    assert isinstance(x, GroupedTensor)
    return replace(x, **{name: p.map(torch.clone) for name, p in x.planes.items()})  # type: ignore[arg-type]


def without_hooks(weight: Tensor, queue: WgradQueue | None) -> Tensor:
    """What stands for a weight in the graph of a pass that leaves its gradient to a queue.

    A leaf of its own on the same memory: autograd would call the weight's hooks in backward, with no gradient to give.
    Dynamo cannot trace it; there the weight itself must do.
    """
    if queue is None or not (weight.requires_grad and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        return weight
    return weight.detach().requires_grad_()


def find_queue(ticket: Tensor) -> WgradQueue:
    """The queue of a ticket."""
    return tickets.find(ticket, WgradQueue)
