"""Forward dataflow over `Events`: is shared memory that a bulk store reads written again without word from the one who waited?

The state of a path has three parts: what happened to data in shared memory (nothing, written, written and then handed over by a
barrier), what the last bulk store of handed-over data is doing (see below), and whether any store is still pending.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from blockscale.guard.audit.sass import events as ev
from blockscale.guard.audit.sass.events import Events

_UNTOUCHED, _WRITTEN, _HANDED = range(3)
#: no store; pending; its issuer has waited; has then arrived at an mbarrier, which may carry the news
_CLEAN, _PENDING, _WAITED, _MAYBE = range(4)
_PHASES = 4
State = tuple[int, int, bool]


@dataclass(frozen=True)
class Handoff:
    """What a kernel's paths do, as indices of events.

    Attributes:
        unhanded: shared writes on a path where only the issuer knows that the store is done.
        undecided: shared writes on a path where an mbarrier may have carried the news.
        undrained: exits with a store pending.
    """

    unhanded: tuple[int, ...]
    undecided: tuple[int, ...]
    undrained: tuple[int, ...]


def step(kind: int, depth: int, state: State) -> State:
    """The state after an event."""
    data, phase, pending = state
    if kind == ev.SHARED_WRITE:
        return _WRITTEN, phase, pending
    if kind == ev.BULK_STORE:
        # a store of a warp's own data needs no barrier: the warp knows when its thread has waited
        return data, _PENDING if data == _HANDED else phase, True
    if kind == ev.WAIT:
        return data, _WAITED if phase == _PENDING else phase, pending and depth > 0
    if kind == ev.BARRIER:
        return _HANDED if data == _WRITTEN else data, _PENDING if phase == _PENDING else _CLEAN, pending
    if kind == ev.ARRIVE:
        return data, _MAYBE if phase == _WAITED else phase, pending
    return state


def _number(state: State) -> int:
    return (state[0] * _PHASES + state[1]) * 2 + state[2]


_STATES: list[State] = [(data, phase, bool(pending)) for data in range(3) for phase in range(_PHASES) for pending in range(2)]
START = 1 << _number((_UNTOUCHED, _CLEAN, False))
_IN_WAITED = sum(1 << _number(state) for state in _STATES if state[1] == _WAITED)
_IN_MAYBE = sum(1 << _number(state) for state in _STATES if state[1] == _MAYBE)
_IN_PENDING = sum(1 << _number(state) for state in _STATES if state[2])


@lru_cache(maxsize=1 << 16)
def _step_all(kind: int, shallow: bool, maybe: bool, states: int) -> int:
    """`step` over a set of states, one bit each."""
    # the issuer arrives in a branch and the others under the opposite guard: on every real path somebody does
    after = states if maybe and kind != ev.ARRIVE else 0
    for index, state in enumerate(_STATES):
        if states >> index & 1:
            after |= 1 << _number(step(kind, int(shallow), state))
    return after


def judge(events: Events) -> Handoff:
    """Follows every path to a fixed point."""
    before = reach(events)
    kinds = events.kind.tolist()

    def where(kind: int, states: int) -> tuple[int, ...]:
        return tuple(i for i, here in enumerate(before[:-1]) if kinds[i] == kind and here & states)

    unhanded = where(ev.SHARED_WRITE, _IN_WAITED)
    undecided = where(ev.SHARED_WRITE, _IN_MAYBE)
    undrained = where(ev.EXIT, _IN_PENDING)
    return Handoff(unhanded, undecided, undrained)


def reach(events: Events) -> list[int]:
    """The states that may hold before each event; the last entry is the end of the code."""
    kinds, maybe = events.kind.tolist(), events.maybe.tolist()
    targets, shallow = events.target.tolist(), (events.depth > 0).tolist()
    count = len(kinds)
    before = [0] * (count + 1)
    before[0] = START
    work = [0]
    while work:
        index = work.pop()
        while index < count:
            here, kind = before[index], kinds[index]
            falls = True
            if kind in (ev.BRANCH, ev.CALL):
                target = targets[index]
                if here & ~before[target]:
                    before[target] |= here
                    work.append(target)
                falls = kind == ev.CALL or maybe[index]
                after = here
            elif kind in (ev.EXIT, ev.INDIRECT):
                falls, after = maybe[index], here
            else:
                after = _step_all(kind, shallow[index], maybe[index], here)
            index += 1
            if not falls or not after & ~before[index]:
                break
            before[index] |= after
    return before
