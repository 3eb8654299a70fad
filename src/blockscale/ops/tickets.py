"""Objects on the host that operators find by a number in a tensor, so that a compiled graph can carry them.

A ticket is an int64 [2] tensor on the CPU, (number of the object, count): reading it costs no sync, and a graph compiled
for one module serves another, whose ticket holds another number.
"""

from __future__ import annotations

import itertools
import weakref
from typing import Any, TypeVar

import torch
from torch import Tensor

_numbers = itertools.count(1)
_objects: weakref.WeakValueDictionary[int, Ticketed] = weakref.WeakValueDictionary()
AnyTicketed = TypeVar("AnyTicketed", bound="Ticketed")


class Ticketed:
    """Base of such objects. A copy (``copy.deepcopy``, pickle) is a fresh, empty object with a ticket of its own."""

    def __init__(self) -> None:
        number = next(_numbers)
        self.ticket = torch.tensor([number, 0], device="cpu")
        _objects[number] = self

    def __deepcopy__(self: AnyTicketed, memo: dict[int, Any]) -> AnyTicketed:
        return type(self)()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


def find_living(ticket: Tensor, kind: type[AnyTicketed]) -> AnyTicketed | None:
    """The object of a ticket, None when it no longer exists."""
    found = _objects.get(int(ticket[0]))
    return found if isinstance(found, kind) else None


def find(ticket: Tensor, kind: type[AnyTicketed]) -> AnyTicketed:
    """The object of a ticket; ``ValueError`` when it no longer exists or is of another kind."""
    found = find_living(ticket, kind)
    if found is None:
        raise ValueError(f"ticket holds {int(ticket[0])}; no living {kind.__name__} has that number")
    return found
