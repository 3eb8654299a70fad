"""What a rule is, and what it sees of a kernel."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from blockscale.guard.audit.cubin import WORD, Kernel
from blockscale.guard.audit.handoff import Handoff, judge
from blockscale.guard.audit.sass import archs, events, fields
from blockscale.guard.audit.sass.events import Events

Severity = Literal["note", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = ("note", "warning", "error")
#: graphs whose verdict a process remembers
_REMEMBERED = 1 << 16


@dataclass(frozen=True)
class Hit:
    """A rule's finding in one kernel.

    Attributes:
        offset: program counter in bytes; None for the kernel as a whole.
        marks: (program counter, remark) of other instructions that belong to it; shown in the HTML report.
    """

    offset: int | None
    detail: str
    severity: Severity | None = None
    marks: tuple[tuple[int, str], ...] = ()


@dataclass(frozen=True)
class Undecided:
    """A rule applies to the kernel and cannot tell; listed among what was not checked."""

    why: str


@dataclass(frozen=True)
class Options:
    """What a user may set for the rules. ``stack_limit``: bytes a thread may use without a finding."""

    stack_limit: int = 1024


@dataclass(frozen=True)
class Rule:
    """One check of one kernel.

    Attributes:
        id: stable name in reports and baselines.
        severity: of its findings, unless a `Hit` says otherwise.
        summary: one line.
        check: yields what it finds.
        needs_code: reads instructions, so only targets with a verified table are judged.
        default: runs unless rules are named.
    """

    id: str
    severity: Severity
    summary: str
    check: Callable[[KernelView], Iterable[Hit | Undecided]]
    needs_code: bool = True
    default: bool = True


@dataclass
class KernelView:
    """A kernel with what several rules need of it, each computed once."""

    kernel: Kernel
    arch: str
    options: Options
    memory: Memory = field(repr=False)

    @cached_property
    def operations(self) -> npt.NDArray[np.uint16]:
        """The 12-bit operation of each instruction."""
        return fields.opcodes(self.kernel.code)

    @cached_property
    def events(self) -> Events | None:
        """The ordering events; None for a kernel without a bulk store."""
        if archs.number(self.arch) < archs.FIRST_WITH_BULK_COPY or not events.has_bulk_store(self.operations):
            return None
        found = events.extract(self.kernel.code)
        return found if bool((found.kind == events.BULK_STORE).any()) else None

    @cached_property
    def handoff(self) -> Handoff | None:
        """What paths do to memory that bulk stores read; None without a bulk store."""
        return None if self.events is None else self.memory.judge(self.events)

    def pc(self, event: int) -> int:
        """Program counter of an event."""
        assert self.events is not None
        return int(self.events.at[event]) * WORD


class Memory:
    """Verdicts that a process keeps, so that equal graphs are followed once. Bounded: it forgets all when full."""

    def __init__(self) -> None:
        self._handoffs: dict[bytes, Handoff] = {}

    def judge(self, graph: Events) -> Handoff:
        """`handoff.judge`, once for each graph."""
        key = hashlib.blake2b(graph.key(), digest_size=16).digest()
        found = self._handoffs.get(key)
        if found is None:
            if len(self._handoffs) >= _REMEMBERED:
                self._handoffs.clear()
            found = self._handoffs[key] = judge(graph)
        return found


def pcs(offsets: Iterable[int], limit: int = 4) -> str:
    """``"0x10, 0x20 and 3 more"``."""
    listed = list(offsets)
    shown = ", ".join(f"{offset:#x}" for offset in listed[:limit])
    return shown if len(listed) <= limit else f"{shown} and {len(listed) - limit} more"
