"""Where the operators of a layer hand over their tensors to whoever watches the layer (``bs.watch``).

A layer that is watched has a :class:`Tap`; its operators get the tap's ticket, so that compiled graphs carry it too. One
that is not watched passes None, and nothing happens. Listeners only look: they get the tensors of the step and must not
keep them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from blockscale.ops import registry, tickets
from blockscale.tensors import GroupedTensor

#: roles that :func:`see` can hand over from a compiled graph, by number
PLAIN_ROLES = ("input", "output", "gradient")


class Listener(Protocol):
    """Somebody who watches a layer."""

    def wants(self, role: str) -> bool:
        """Whether a tensor of this role would be looked at now."""

    def see(self, tensor: Seen, offsets: Tensor | None) -> None:
        """Look at a tensor, its rows grouped by ``offsets`` (None: one group, any shape)."""

    def see_pass(self, tensors: Sequence[Seen], offsets: Tensor) -> None:
        """Look at the tensors of one pass, each made of the one before."""


@dataclass(frozen=True)
class Seen:
    """One tensor of a pass: its role, (M, K) rows, and the operand made of it (a quantized one has scales to look at)."""

    role: str
    x: Tensor
    q: object = None

    @property
    def quantized(self) -> GroupedTensor | None:
        """The quantized operand, where it has a rowwise plane."""
        return self.q if isinstance(self.q, GroupedTensor) and self.q.rowwise is not None else None


class Tap(tickets.Ticketed):
    """The listeners of one layer. Copying a layer leaves the copy without any."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners: tuple[Listener, ...] = ()

    def wants(self, role: str) -> bool:
        """Whether anybody would look."""
        return any(listener.wants(role) for listener in self.listeners)

    def see(self, role: str, x: Tensor, offsets: Tensor | None = None, q: object = None) -> None:
        """Hand a tensor to every listener. ``q``: the operand made of x; a quantized one has scales to look at."""
        for listener in self.listeners:
            listener.see(Seen(role, x, q), offsets)

    def see_pass(self, tensors: Sequence[Seen], offsets: Tensor) -> None:
        """Hand over the tensors of one pass, each made of the one before: a NaN in one reaches the last."""
        for listener in self.listeners:
            listener.see_pass(tensors, offsets)

    def see_weight(self, role: str, w_GNK: Tensor, q: object = None) -> None:
        """Hand over weights or their gradients, a group each."""
        if not self.wants(role):
            return
        G, N, K = w_GNK.shape
        offsets = q.offsets if isinstance(q, GroupedTensor) else torch.arange(G + 1, device=w_GNK.device) * N
        self.see(role, w_GNK.reshape(G * N, K), offsets, q)


def recomputing() -> bool:
    """Whether a forward pass runs inside a backward pass: its tensors were seen before."""
    return bool(torch._C._current_graph_task_id() != -1)


def forward_tap(ticket: Tensor | None) -> Tap | None:
    """The tap of a ticket in a forward pass; None when nobody listens or the pass is a recomputation."""
    return None if ticket is None or recomputing() else backward_tap(ticket)


def backward_tap(ticket: Tensor | None) -> Tap | None:
    """The tap of a ticket; None when nobody listens any more."""
    return None if ticket is None else tickets.find_living(ticket, Tap)


def _see(x: Tensor | None, ticket: Tensor, role: int) -> None:
    ticket[1] += 1  # a mutation, so that no compiler takes the call for useless
    tap = backward_tap(ticket)
    # a compiled backward hands over None as the gradient of an output that nothing used
    if x is not None and tap is not None and not (recomputing() and PLAIN_ROLES[role] != "gradient"):
        tap.see(PLAIN_ROLES[role], x)


registry.define("see(Tensor x, Tensor(a!) ticket, int role) -> ()", _see, lambda x, ticket, role: None)


def see(x: Tensor, tap: Tap, role: str) -> None:
    """Hand over a tensor of a plain module, from a graph that is being compiled too."""
    torch.ops.blockscale.see(x, tap.ticket, PLAIN_ROLES.index(role))
