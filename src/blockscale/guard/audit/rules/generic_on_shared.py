"""``generic-on-shared``: shared memory accessed through a generic address.

What: a generic load, store or atomic (LD, ST, ATOM) whose address has the shared window (SR_SWINHI, sm_90 and later) in its
high word.
Why: legal, but slower than LDS and STS, and a sign that a pointer went through an integer, so that the compiler lost what it
points to.
Evidence: the value of SR_SWINHI followed through copies, selections and address arithmetic into the address's high word.
What it cannot see: a pointer that went through memory, a call or an instruction that is not address arithmetic. Pointers into
another block of a cluster (``mapa``) are generic by nature and are not findings.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from blockscale.guard.audit.cubin import WORD
from blockscale.guard.audit.rules.base import Hit, KernelView, Rule, Undecided
from blockscale.guard.audit.sass import events, fields
from blockscale.guard.audit.sass.slicing import Slicer, SliceTooLargeError

_ACCESSES = (0x980, 0x985, 0x385, 0x98A, 0x38A)
_PRMT_WITH_IMMEDIATE, _PUT_RANK_ON_TOP = 0x816, 0x654


def check(view: KernelView) -> Iterator[Hit | Undecided]:
    """One note for a kernel, at the first such access."""
    try:
        yield from _first(view)
    except SliceTooLargeError as error:
        yield Undecided(str(error))


def _first(view: KernelView) -> Iterator[Hit]:
    accesses = np.flatnonzero(np.isin(view.operations, _ACCESSES))
    if not len(accesses):
        return
    code = view.kernel.code
    window = {int(at) for at in events.reads_shared_window(code, view.operations)}
    if not window:
        return
    slicer = Slicer(code)
    for at, address in zip(accesses.tolist(), fields.field(code[2 * accesses], 24, 8).tolist(), strict=True):
        shared = slicer.reaches(at, (False, address + 1), window)
        if shared and not _of_cluster(view, slicer.origins(at, (False, address))):
            yield Hit(
                at * WORD, f"shared memory accessed at {at * WORD:#x} through a generic address; {len(accesses)} generic accesses"
            )
            return


def _of_cluster(view: KernelView, passed: set[int]) -> bool:
    """Whether the low word got the rank of a block in the cluster as its top byte."""
    code = view.kernel.code
    return any(view.operations[at] == _PRMT_WITH_IMMEDIATE and int(code[2 * at]) >> 32 == _PUT_RANK_ON_TOP for at in passed)


RULE = Rule("generic-on-shared", "note", "shared memory accessed through a generic address", check)
