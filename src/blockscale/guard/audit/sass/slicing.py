"""Where a register's value comes from: reaching definitions, followed backwards through copies and address arithmetic.

Operand slots are regular: the destination is bits 16-23; a is bits 24-31; the form (bits 9-11) says where b and c lie and
whether one of them is an immediate, a constant or a uniform register. Each slot used here was checked against the vendor's
disassembler.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import numpy.typing as npt

from blockscale.guard.audit.sass import events as ev
from blockscale.guard.audit.sass import fields
from blockscale.guard.audit.sass.fields import Words

#: a register: uniform or not, and its number
Register = tuple[bool, int]
_R, _U = False, True
_ZERO = (63, 255)

# low 9 bits of operations that pass a value on: what they are, and which operands carry an address
_MOV, _SEL, _IADD3, _LEA, _PRMT = 0x002, 0x007, 0x010, 0x011, 0x016
_IMAD, _IMAD_WIDE, _IADD, _VIADD = 0x024, 0x025, 0x035, 0x036
_UMOV, _USEL, _UIADD3, _ULEA, _UIADD3_64, _UIMAD, _UIMAD_WIDE = 0x082, 0x087, 0x090, 0x091, 0x097, 0x0A4, 0x0A5
_R2UR = 0x0CA
_CARRIES: dict[int, str] = {
    _MOV: "b",
    _SEL: "ab",
    _IADD3: "abc",
    _LEA: "ab",
    _PRMT: "ac",
    _IMAD: "abc",
    _IMAD_WIDE: "c",
    _IADD: "ab",
    _VIADD: "ab",
    _UMOV: "b",
    _USEL: "ab",
    _UIADD3: "abc",
    _ULEA: "ab",
    _UIADD3_64: "abc",
    _UIMAD: "abc",
    _UIMAD_WIDE: "c",
    _R2UR: "a",
}
_TRY_WAIT = 0x5A7
#: predicates
_NO_RESULT = {0x004, 0x102, 0x00B, 0x00C, 0x01C, 0x02A, 0x053, 0x08C, 0x09C}
#: stores
_NO_RESULT |= {0x044, 0x185, 0x186, 0x187, 0x188, 0x18E, 0x1AE, 0x1B4, 0x1B5, 0x1B6, 0x1BA, 0x1BB, 0x1BD, 0x1ED}
#: barriers, fences and what else acts by itself
_NO_RESULT |= {
    0x02D,
    0x02E,
    0x04C,
    0x118,
    0x11A,
    0x11B,
    0x11D,
    0x18F,
    0x192,
    0x1AB,
    0x1AF,
    0x1B0,
    0x1B1,
    0x1B7,
    0x1B9,
    0x1C6,
    0x1C7,
    0x1C8,
    0x1CA,
}
#: matrix units
_NO_RESULT |= {0x1E7, 0x1E9, 0x1EA}
_UNIFORM_RESULT = frozenset({0x0CA, 0x0CC, 0x1C3, 0x1C4, 0x1AC, 0x0B9, 0x0BB, 0x0BD, 0x0BF, 0x05A, 0x05C})
_LOADS = frozenset({0x180, 0x181, 0x182, 0x183, 0x184, 0x1AC, 0x0B9, 0x0BB})
_ALWAYS_WIDE = frozenset({_IMAD_WIDE, _UIADD3_64, _UIMAD_WIDE, 0x005, 0x028, 0x029, 0x02B})
_ALWAYS_WIDE_FORMS = frozenset({0x402, 0x482, 0x407, 0x607, 0xC87})


#: blocks that one kernel's slices may visit; address arithmetic of shipped kernels needs far fewer
MAX_VISITS = 50_000


class SliceTooLargeError(RuntimeError):
    """A kernel's slices visit more than `MAX_VISITS` blocks."""


class Slicer:
    """Backward slices in one kernel. Built when a rule first asks."""

    def __init__(self, code: Words) -> None:
        self._low, self._high = code[::2].tolist(), code[1::2].tolist()
        self._operations = fields.opcodes(code).tolist()
        self._code = code
        self._visits = 0
        self._writers: dict[Register, list[int]] = {}
        self._fruitless: set[tuple[int, Register]] = set()
        self._graph = ev.extract(code)

    def definitions(self, at: int, register: Register) -> Iterator[int]:
        """Instructions whose result may be in the register just before instruction ``at``."""
        writers = self._written_by(register)
        seen: set[int] = set()
        work = [(self._block_of(at), at)]
        while work:
            block, before = work.pop()
            self._visits += 1
            if self._visits > MAX_VISITS:
                raise SliceTooLargeError(f"its slices visit more than {MAX_VISITS:,} blocks")
            start = self._leaders[block]
            place = bisect_left(writers, before)
            while place and writers[place - 1] >= start:
                place -= 1
                yield writers[place]
                if self._low[writers[place]] >> 12 & 15 == 7:
                    break
            else:
                for previous in self._before[block]:
                    if previous not in seen:
                        seen.add(previous)
                        work.append((previous, self._ends[previous]))

    def reaches(self, at: int, register: Register, goals: set[int]) -> bool:
        """Whether the register's value just before ``at`` may come from one of the goals; the same goals in every call."""
        seen: set[tuple[int, Register]] = set()
        work = [(at, register)]
        while work:
            user, wanted = work.pop()
            for definition in self.definitions(user, wanted):
                if definition in goals:
                    return True
                for source in self._sources(definition, wanted):
                    step = (definition, source)
                    if step not in seen and step not in self._fruitless:
                        seen.add(step)
                        work.append(step)
        self._fruitless |= seen
        return False

    def origins(self, at: int, register: Register) -> set[int]:
        """Every instruction that the register's value may have passed on its way to ``at``."""
        found: set[int] = set()
        seen = {(at, register)}
        work = [(at, register)]
        while work:
            user, wanted = work.pop()
            for definition in self.definitions(user, wanted):
                found.add(definition)
                for source in self._sources(definition, wanted):
                    if (definition, source) not in seen:
                        seen.add((definition, source))
                        work.append((definition, source))
        return found

    def _sources(self, at: int, result: Register) -> Iterator[Register]:
        """Registers that an instruction of address arithmetic passes on; none for any other."""
        operation = self._operations[at]
        carries = _CARRIES.get(operation & 0x1FF, "")
        destination = self._low[at] >> 16 & 0xFF
        shift = 1 if result[1] != destination else 0
        for slot in carries:
            operand = self._operand(at, slot)
            if operand and operand[1] not in _ZERO:
                wide = self._wide(at) or operation & 0x1FF in (_IMAD_WIDE, _UIMAD_WIDE)
                yield operand[0], operand[1] + (shift if wide else 0)

    def _operand(self, at: int, slot: str) -> Register | None:
        low, high, operation = self._low[at], self._high[at], self._operations[at]
        form, uniform = operation >> 9, bool(operation & 0x80) and operation & 0x1FF != _R2UR
        if slot == "a":
            return uniform, low >> 24 & 0xFF
        # forms 2, 3 and 7 put c into bits 32-63 and b into bits 64-71
        swapped = form in (2, 3, 7)
        if (slot == "b") == swapped:
            return uniform, high & 0xFF
        if form in (1, 6, 7):
            return uniform or form != 1, low >> 32 & 0xFF
        return None

    def _wide(self, at: int) -> bool:
        """Whether the result is a pair of registers, or more."""
        operation, high = self._operations[at], self._high[at]
        base = operation & 0x1FF
        if base in _ALWAYS_WIDE or operation in _ALWAYS_WIDE_FORMS:
            return True
        if base in (_MOV, _UMOV):
            return bool(high >> 16 & 1)
        if base == _IADD:
            return bool(high >> 9 & 1)
        return False

    def _written_by(self, register: Register) -> list[int]:
        """The instructions that write a register, in order."""
        found = self._writers.get(register)
        if found is None:
            first, count, uniform = self._results
            uniform_too = uniform if register[0] else ~uniform
            found = np.flatnonzero(uniform_too & (first <= register[1]) & (register[1] < first + count)).tolist()
            self._writers[register] = found
        return found

    @cached_property
    def _results(self) -> tuple[fields.Ints, fields.Ints, npt.NDArray[np.bool_]]:
        """Of each instruction: first register written, how many (0: none), whether they are uniform."""
        operations, high = fields.opcodes(self._code), self._code[1::2]
        base = operations & 0x1FF
        first = fields.field(self._code[::2], 16, 8)
        wide = np.isin(base, list(_ALWAYS_WIDE)) | np.isin(operations, list(_ALWAYS_WIDE_FORMS))
        wide |= np.isin(base, (_MOV, _UMOV)) & (fields.field(high, 16, 1) == 1)
        wide |= (base == _IADD) & (fields.field(high, 9, 1) == 1)
        count = np.where(wide, 2, 1)
        loads = np.isin(base, list(_LOADS)) | (operations == 0xB82)
        count[loads] = np.array([1, 1, 1, 1, 1, 2, 4, 1])[fields.field(high, 9, 3)[loads]]
        # 0x140 to 0x15f: control flow
        none = np.isin(base, list(_NO_RESULT)) | ((base >= 0x140) & (base < 0x160)) | (first == 255)
        # try_wait; an arrive has the same low bits and a result
        none |= operations == _TRY_WAIT
        count[none] = 0
        uniform = ((base >= 0x080) & (base < 0x0C0)) | ((base >= 0x050) & (base < 0x060)) | np.isin(base, list(_UNIFORM_RESULT))
        return first, count, uniform

    @cached_property
    def _leaders(self) -> list[int]:
        """First instruction of each block."""
        jumps = np.isin(self._graph.kind, (ev.BRANCH, ev.EXIT, ev.INDIRECT))
        behind = self._graph.at[jumps] + 1
        leaders = np.unique(np.concatenate(([0], behind, self._targets)))
        return leaders[leaders < len(self._low)].tolist()

    @cached_property
    def _targets(self) -> fields.Ints:
        """Where the branches lead."""
        at = self._graph.at[self._graph.kind == ev.BRANCH]
        low, high = np.array(self._low, np.uint64)[at], np.array(self._high, np.uint64)[at]
        targets = fields.relative_targets(at, low, high)
        return targets[(targets >= 0) & (targets < len(self._low))]

    @cached_property
    def _ends(self) -> list[int]:
        return [*self._leaders[1:], len(self._low)]

    def _block_of(self, at: int) -> int:
        place = bisect_left(self._leaders, at)
        return place if place < len(self._leaders) and self._leaders[place] == at else place - 1

    @cached_property
    def _before(self) -> list[list[int]]:
        """Blocks that lead to each block."""
        found: list[list[int]] = [[] for _ in self._leaders]
        kinds = dict(
            zip(self._graph.at.tolist(), zip(self._graph.kind.tolist(), self._graph.maybe.tolist(), strict=True), strict=True)
        )
        for block, end in enumerate(self._ends):
            kind, maybe = kinds.get(end - 1, (ev.NONE, True))
            if kind == ev.BRANCH:
                low, high = np.array([self._low[end - 1]], np.uint64), np.array([self._high[end - 1]], np.uint64)
                target = int(fields.relative_targets(np.array([end - 1]), low, high)[0])
                if 0 <= target < len(self._low):
                    found[self._block_of(target)].append(block)
            if (kind not in (ev.BRANCH, ev.EXIT, ev.INDIRECT) or maybe) and block + 1 < len(found):
                found[block + 1].append(block)
        return found
