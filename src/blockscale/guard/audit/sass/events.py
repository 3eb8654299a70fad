"""The instructions that order shared memory, as a small graph: what a dataflow over hand-offs needs and nothing else.

A kernel of thousands of instructions has some hundred events, and many kernels of one template have the same graph:
`Events.key` lets a rule judge each graph once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from blockscale.guard.audit.sass import fields
from blockscale.guard.audit.sass.fields import Ints, Words

NONE, BRANCH, EXIT, CALL, INDIRECT, SHARED_WRITE, BULK_STORE, WAIT, BARRIER, ARRIVE = range(10)

_BRA, _BRA_U = 0x947, 0x547
_KINDS: dict[int, tuple[int, ...]] = {
    BRANCH: (_BRA, _BRA_U),
    EXIT: (0x94D, 0x950),
    CALL: (0x944,),
    # BRX, JMX and their uniform forms: the targets are in a register
    INDIRECT: (0x949, 0x94C, 0x958, 0x959),
    # STS, STSM, LDGSTS; a generic ST only in a kernel that reads the shared window
    SHARED_WRITE: (0x388, 0x988, 0x844, 0xFAE, 0x385, 0x985),
    # UTMASTG, UTMAREDG, UBLKCP (only from shared to global), UBLKRED
    BULK_STORE: (0x3B5, 0x3B6, 0x3BA, 0x3BB),
    WAIT: (0x91A,),
    BARRIER: (0xB1D, 0x31D, 0x51D, 0x91D),
    ARRIVE: (0x9A7,),
}
_TABLE: npt.NDArray[np.uint8] = np.zeros(4096, np.uint8)
for _kind, _operations in _KINDS.items():
    _TABLE[list(_operations)] = _kind

_GENERIC_STORES = (0x385, 0x985)
_BULK_COPY, _FROM_SHARED_TO_GLOBAL = 0x3BA, 2
_S2UR, _S2R, _SWINHI = 0x9C3, 0x919, 0x2F
_ARRIVE_ONLY = 1
_TRUE = 7


@dataclass(frozen=True)
class Events:
    """A kernel's events in the order of their addresses.

    Attributes:
        at: instruction index of each.
        kind: one of the constants above.
        maybe: whether it may not happen: it has a guard. For a branch: whether it may fall through.
        target: the event at or behind a branch's or call's target, ``len(at)`` for none.
        depth: for WAIT, how many groups may stay pending.
        indirect: whether there is a jump whose targets are not known.
    """

    at: Ints
    kind: npt.NDArray[np.uint8]
    maybe: npt.NDArray[np.bool_]
    target: Ints
    depth: Ints
    indirect: bool

    def key(self) -> bytes:
        """The same for kernels whose graphs are the same."""
        parts = (self.kind, self.maybe, self.target.astype(np.int32), self.depth.astype(np.int8))
        return b"".join(part.tobytes() for part in parts)


def has_bulk_store(operations: npt.NDArray[np.uint16]) -> bool:
    """A quick look: whether there may be a bulk store at all."""
    return bool((_TABLE.take(operations) == BULK_STORE).any())


def reads_shared_window(code: Words, operations: npt.NDArray[np.uint16]) -> npt.NDArray[np.intp]:
    """Indices of the instructions that read SR_SWINHI."""
    reads = np.flatnonzero((operations == _S2UR) | (operations == _S2R))
    return reads[fields.field(code[2 * reads + 1], 8, 8) == _SWINHI]


def extract(code: Words) -> Events:
    """The events of a kernel."""
    operations = fields.opcodes(code)
    kind = _TABLE.take(operations)
    at = np.flatnonzero(kind)
    low, high, kind, operations_at = code[2 * at], code[2 * at + 1], kind[at], operations[at]
    keep = ~fields.never(low) & _specific(low, high, operations_at)
    if not len(reads_shared_window(code, operations)):
        keep &= ~np.isin(operations_at, _GENERIC_STORES)
    at, low, high, kind, operations_at = at[keep], low[keep], high[keep], kind[keep], operations_at[keep]
    maybe = ~fields.always(low)
    jumps = kind == BRANCH
    maybe[jumps] |= _may_fall_through(low[jumps], high[jumps], operations_at[jumps])
    target = np.full(len(at), len(at), np.int64)
    moves = jumps | (kind == CALL)
    target[moves] = np.searchsorted(at, fields.relative_targets(at[moves].astype(np.int64), low[moves], high[moves]))
    depth = np.where(kind == WAIT, fields.field(low, 38, 6), 0)
    return Events(at.astype(np.int64), kind, maybe, target, depth, bool((kind == INDIRECT).any()))


def _specific(low: Words, high: Words, operations: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """False where an operation has forms that mean something else."""
    wrong_way = (operations == _BULK_COPY) & (fields.field(high, 9, 2) != _FROM_SHARED_TO_GLOBAL)
    by_mask = (operations == 0x91A) & (fields.field(low, 47, 1) == 0)
    barrier = _TABLE[operations] == BARRIER
    arrive_only = barrier & (fields.field(high, 13, 3) == _ARRIVE_ONLY)
    return ~(wrong_way | by_mask | arrive_only)


def _may_fall_through(low: Words, high: Words, operations: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    uniform = (operations == _BRA_U) & (fields.field(low, 24, 4) != _TRUE)
    # bits 32-33: 2 for BRA.DIV and 3 for BRA.CONV, which depend on the warp's other threads
    return uniform | (fields.field(high, 23, 4) != _TRUE) | (fields.field(low, 32, 2) >= 2)
