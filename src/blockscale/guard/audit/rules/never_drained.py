"""``never-drained``: a block may end while a bulk store is pending.

What: an exit is reachable from a bulk store with no ``wait_group 0`` between.
Why: shared memory is given to the next block while the store may still read it. Hardware is believed to hold the block's
shared memory until then, and CUTLASS relies on it too: a note, not an error.
Evidence: the same dataflow as ``tma-handoff``.
What it cannot see: which thread exits: an exit of threads that never issued a store counts when a path leads there.
"""

from __future__ import annotations

from collections.abc import Iterator

from blockscale.guard.audit.rules.base import Hit, KernelView, Rule, Undecided, pcs


def check(view: KernelView) -> Iterator[Hit | Undecided]:
    """One note for a kernel, at the first such exit."""
    if view.handoff is not None and view.handoff.undrained:
        exits = [view.pc(event) for event in view.handoff.undrained]
        yield Hit(exits[0], f"may exit at {pcs(exits)} with a bulk store pending")


RULE = Rule("never-drained", "note", "a block may end while a bulk store is pending", check)
