"""Where the counters of a step lie: one row a group of each (layer, role), on the device, added to in place.

The rows of a device lie in few buffers, so that a step ends with one copy and one reset of each: nothing waits for the
device. Legend: S slots, R rows (groups of all slots), F counters.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.layouts import PLANES
from blockscale.ops import backend
from blockscale.ops.tap import Seen
from blockscale.tensors import GroupedTensor
from blockscale.tensors.counters import FIELDS, SUMS, fresh

_ROWS = 1024


@dataclass(eq=False)
class Slot:
    """The counters of one tensor of a layer. ``first_call``: when it was first seen in this step, None: not yet."""

    layer: str
    role: str
    arena: int
    start: int
    table: Tensor
    format: str | None = None
    first_call: int | None = None

    @property
    def groups(self) -> int:
        """G: experts, or 1."""
        return self.table.shape[0]


@dataclass
class Arena:
    """Rows of one device."""

    table: Tensor
    fresh: Tensor
    used: int = 0


@dataclass(frozen=True)
class Snapshot:
    """What was counted in one step, on its way to the host.

    ``slots`` with when each was first seen, in that order; ``tables``: the arenas' rows; ``events``: to wait for. Without any:
    every tensor was found finite as it was counted, and nobody asked for more.
    """

    step: int
    full: bool
    slots: list[tuple[Slot, int]]
    tables: list[Tensor]
    events: list[torch.cuda.Event]

    def ready(self) -> bool:
        """Whether the copies have arrived."""
        return all(event.query() for event in self.events)

    def wait(self) -> None:
        """Until they have."""
        for event in self.events:
            event.synchronize()

    def clean(self) -> bool:
        """Whether there is no NaN and no infinity."""
        return not any(bool((table[:, :2] > 0).any()) for table in self.tables)

    def rows(self, slot: Slot) -> Tensor:
        """float64 (G, F) of one slot."""
        return self.tables[slot.arena][slot.start : slot.start + slot.groups]

    def totals(self) -> Tensor:
        """float64 (S, F): each slot's groups together."""
        if not self.slots:
            return fresh(0, torch.device("cpu"))
        rows = torch.cat([self.rows(slot) for slot, _ in self.slots])
        sizes = torch.tensor([slot.groups for slot, _ in self.slots])
        index = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        sums = torch.zeros((len(sizes), len(SUMS)), dtype=torch.float64).index_add_(0, index, rows[:, : len(SUMS)])
        most = fresh(len(sizes), rows.device)[:, len(SUMS) :]
        most = most.scatter_reduce(0, index[:, None].expand(-1, most.shape[1]), rows[:, len(SUMS) :], "amax")
        return torch.cat((sums, most), 1)


class Slots:
    """All slots of one watch."""

    def __init__(self) -> None:
        self._slots: dict[tuple[str, str], Slot] = {}
        self._arenas: list[Arena] = []
        self._lock = threading.Lock()
        self._extents: dict[tuple[int, torch.device], Tensor] = {}
        self._calls = 0
        self._finite = True  # whether all that was counted in this step is known to be

    @property
    def layers(self) -> set[str]:
        """Names of the layers that were ever seen."""
        return {layer for layer, _ in self._slots}

    @property
    def touched(self) -> bool:
        """Whether anything was seen since the last :meth:`take`."""
        return self._calls > 0

    def add(self, layer: str, tensor: Seen, offsets: Tensor | None, full: bool) -> None:
        """Count what a tensor holds; rows grouped by ``offsets``, or all of it in one group. ``full``: its scales too."""
        if tensor.x.numel() or offsets is not None:
            call = self._reserve(1)
            if full or not self._count_finite(layer, tensor, offsets, call):
                self._count(layer, tensor, offsets, full, call)

    def add_pass(self, layer: str, tensors: Sequence[Seen], offsets: Tensor, full: bool) -> None:
        """Count what tensors hold each of which is made of the one before.

        On the CPU, unless ``full``, the last one is looked at, and all of them only if it is not finite.
        """
        call = self._reserve(len(tensors))
        if not full and _nan_reaches_the_last(tensors) and self._count_finite(layer, tensors[-1], offsets, call + len(tensors) - 1):
            return
        for number, tensor in enumerate(tensors, call):
            self._count(layer, tensor, offsets, full, number)

    def _reserve(self, count: int) -> int:
        """The first of so many numbers of observations, in the order in which the tensors were made."""
        with self._lock:
            self._calls += count
            return self._calls - count + 1

    def _count_finite(self, layer: str, tensor: Seen, offsets: Tensor | None, call: int) -> bool:
        """Count a tensor, its scales aside, if it is on the CPU and finite: cheap, and nearly always so. Whether it was counted."""
        if tensor.x.device.type != "cpu":
            return False
        slot = self._touch(layer, tensor, 1 if offsets is None else offsets.shape[0] - 1, call)
        return backend.count_finite(slot.table, tensor.x, offsets)

    def _count(self, layer: str, tensor: Seen, offsets: Tensor | None, full: bool, call: int) -> None:
        x, q = tensor.x, tensor.quantized if full else None
        if offsets is None:
            x = x.reshape(-1, x.shape[-1]) if x.dim() else x.view(1, 1)
            offsets = self._one_group(x.shape[0], x.device)
        slot = self._touch(layer, tensor, offsets.shape[0] - 1, call)
        if q is not None:
            slot.format = q.format.of("rowwise").label
        self._finite = False  # it may be, but the counters alone tell
        backend.count_into(slot.table, x, offsets, q, call)

    def _touch(self, layer: str, tensor: Seen, groups: int, call: int) -> Slot:
        """The slot of a tensor, made if need be, and seen."""
        with self._lock:
            slot = self._slots.get((layer, tensor.role))
            if slot is None or slot.groups != groups or slot.table.device != tensor.x.device:
                slot = self._slots[layer, tensor.role] = self._new(layer, tensor.role, groups, tensor.x.device)
            if slot.first_call is None:
                slot.first_call = call
        return slot

    def _one_group(self, rows: int, device: torch.device) -> Tensor:
        """int64[2]; kept, since making one costs as much as looking at a small tensor."""
        if len(self._extents) > 256:
            self._extents.clear()
        key = (rows, device)
        if key not in self._extents:
            self._extents[key] = torch.arange(2, device=device) * rows
        return self._extents[key]

    def _new(self, layer: str, role: str, groups: int, device: torch.device) -> Slot:
        index = next((i for i, a in enumerate(self._arenas) if _room(a, device) >= groups), None)
        if index is None:
            table = fresh(max(groups, _ROWS), device)
            self._arenas.append(Arena(table, table.clone()))
            index = len(self._arenas) - 1
        arena = self._arenas[index]
        start, arena.used = arena.used, arena.used + groups
        return Slot(layer, role, index, start, arena.table[start : arena.used])

    def take(self, step: int, full: bool, measured: bool = False) -> Snapshot:
        """End a step: send the counters to the host and start again from nothing. No wait for the device.

        ``measured``: magnitudes are asked for, even of a step in which all was found finite.
        """
        with self._lock:
            seen = [(slot, slot.first_call) for slot in self._slots.values() if slot.first_call is not None]
            for slot, _ in seen:
                slot.first_call = None
            tables: list[Tensor] = []
            events: list[torch.cuda.Event] = []
            for arena in self._arenas:
                if not self._finite or measured:
                    tables.append(_to_host(arena.table[: arena.used], events))
                arena.table[: arena.used] = arena.fresh[: arena.used]
            self._calls, self._finite = 0, True
        return Snapshot(step, full, sorted(seen, key=lambda pair: pair[1]) if tables else [], tables, events)


def _nan_reaches_the_last(tensors: Sequence[Seen]) -> bool:
    """Whether, on the host at once, the last tensor tells of a NaN in any: products and activations pass it on."""
    formats = [t.q.format.of(plane) for t in tensors if isinstance(t.q, GroupedTensor) for plane in PLANES]
    ignored = any(getattr(fmt, "nan", "") == "ignore" for fmt in formats)
    return tensors[-1].role in ("output", "dx") and tensors[-1].x.device.type == "cpu" and not ignored


def _room(arena: Arena, device: torch.device) -> int:
    return arena.table.shape[0] - arena.used if arena.table.device == device else 0


def _to_host(rows: Tensor, events: list[torch.cuda.Event]) -> Tensor:
    if rows.device.type != "cuda":
        return rows.to("cpu", copy=True)
    host = torch.empty(rows.shape[0], len(FIELDS), dtype=rows.dtype, pin_memory=True)
    host.copy_(rows, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(rows.device))
    events.append(event)
    return host
