"""``syscall``: an instruction became a call into the driver.

What: the kernel calls an undefined ``__cuda_syscall_*`` function, which only the driver can provide. The compiler does this
when the target lacks an instruction: on sm_120 and sm_121 every bulk load from global memory into ``shared::cluster`` (tensor
or not).
Why: the call needs a stack of some 14 KB a thread, which the driver reserves for every thread that the device can hold,
outside any allocator and for the life of the context: 3.4 GiB on 170 SMs. Each load also costs a call.
Evidence: the compiler's own records (EIATTR_EXTERNS and EIATTR_SYSCALL_OFFSETS); no heuristic.
What it cannot see: the stack that the driver will ask for (it is not in the file); whether the kernel is ever launched.
"""

from __future__ import annotations

from collections.abc import Iterator

from blockscale.guard.audit.rules.base import Hit, KernelView, Rule, Undecided, pcs

PREFIX = "__cuda_syscall_"
#: stack bytes a thread, as two drivers reserved them
STACK_BYTES = (14_432, 14_608)
THREADS_PER_SM, DEFAULT_STACK, GIB = 1536, 1024, 1 << 30


def reserved_gib(sms: int) -> tuple[float, float]:
    """Least and most memory that the driver adds on a device of so many SMs: with and without the default stack taken off."""
    threads = sms * THREADS_PER_SM
    return threads * (STACK_BYTES[0] - DEFAULT_STACK) / GIB, threads * STACK_BYTES[1] / GIB


def check(view: KernelView) -> Iterator[Hit | Undecided]:
    """One finding for a kernel, at its first call."""
    if not any(name.startswith(PREFIX) for name in view.kernel.cubin.undefined):
        return
    called = sorted({name for name in view.kernel.externs if name.startswith(PREFIX)})
    if not called:
        return
    offsets = sorted(view.kernel.syscall_offsets)
    low, high = reserved_gib(170)
    where = f" at {pcs(offsets)}" if offsets else ""
    yield Hit(
        offsets[0] if offsets else None,
        f"calls {', '.join(called)}{where}; the driver reserves {STACK_BYTES[0]:,} to {STACK_BYTES[1]:,} B of stack a thread, "
        f"{low:.2f} to {high:.2f} GiB on 170 SMs",
    )


RULE = Rule("syscall", "error", "an instruction became a driver call that reserves gigabytes of stack", check, needs_code=False)
