"""``tma-handoff``: shared memory is written again while only the issuer of a bulk store knows that the store has read it.

What: a bulk store (``cp.async.bulk`` from shared to global, tensor or not, and its reductions) reads data that the CTA wrote
and handed over through a barrier. Its issuer waits for it (``wait_group``). Then, on some path with no barrier in between,
the kernel writes shared memory.
Why: the wait counts the groups of the thread that executes it; for every other thread it returns at once. Without a barrier
behind it nobody else knows, and a write can land in memory that the store still reads.
Evidence: a dataflow over all paths of the instructions. A strong heuristic: it does not compare addresses, so a write to
another buffer counts.
What it cannot see: whether the race is ever lost; a wait depth too shallow for the ring; hand-off between roles; missing
proxy fences.
A path on which an mbarrier may have carried the news is listed as undecided. Data that a warp writes and stores itself does
not count.
"""

from __future__ import annotations

from collections.abc import Iterator

from blockscale.guard.audit.rules.base import Hit, KernelView, Rule, Undecided, pcs


def check(view: KernelView) -> Iterator[Hit | Undecided]:
    """One finding for a kernel, at the first such write."""
    if view.handoff is None or view.events is None:
        return
    if view.events.indirect:
        yield Undecided("a jump through a register: not all paths are known")
    if view.handoff.unhanded:
        writes = [view.pc(event) for event in view.handoff.unhanded]
        yield Hit(
            writes[0],
            f"shared memory written at {pcs(writes)} after a wait that counts only for the bulk store's issuer, no barrier between",
        )
    elif view.handoff.undecided:
        writes = [view.pc(event) for event in view.handoff.undecided]
        yield Undecided(f"an mbarrier may or may not hand over the issuer's wait (write at {pcs(writes, 1)})")


RULE = Rule("tma-handoff", "error", "shared memory written while a bulk store may still read it", check)
