"""``stack``: a thread needs more stack than a context reserves by default.

What: the frame or the least stack that the compiler declares is beyond the limit (1,024 bytes, ``--stack-limit`` changes it).
Why: 1,024 bytes a thread is what a context reserves; a kernel that needs more makes the driver reserve more for every thread
the device can hold, at its first launch and outside any allocator. A frame is also local memory: spills and indexed arrays
travel to DRAM.
Evidence: EIATTR_FRAME_SIZE and EIATTR_MIN_STACK_SIZE, as the compiler wrote them.
What it cannot see: recursion and calls through pointers (their stack is unknown to the compiler too); what driver calls need
(see ``syscall``).
"""

from __future__ import annotations

from collections.abc import Iterator

from blockscale.guard.audit.rules.base import Hit, KernelView, Rule, Undecided


def check(view: KernelView) -> Iterator[Hit | Undecided]:
    """One finding for a kernel beyond the limit."""
    frame, least = view.kernel.frame or 0, view.kernel.min_stack or 0
    if max(frame, least) > view.options.stack_limit:
        yield Hit(None, f"frame of {frame:,} B, least stack {least:,} B a thread; the limit is {view.options.stack_limit:,}")


RULE = Rule("stack", "warning", "more stack a thread than the limit", check, needs_code=False)
