"""A cubin's kernels and what the compiler wrote down about each (EIATTR records)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from blockscale.guard.audit.elf import PROGBITS, UNDEFINED, Elf
from blockscale.guard.audit.limits import MalformedError

# record formats: 4 bytes of header (format, attribute, u16), for SVAL followed by as many bytes as the u16 says
_SVAL = 4
EXTERNS, FRAME_SIZE, MIN_STACK_SIZE, KPARAM_INFO, MAX_STACK_SIZE, REGCOUNT = 0x0F, 0x11, 0x12, 0x17, 0x23, 0x2F
INDIRECT_BRANCH_TARGETS, SYSCALL_OFFSETS, PARAM_CBANK = 0x34, 0x46, 0x0A
_FUNC, _ENTRY = 2, 0x10
_TARGET = re.compile(rb"-arch (sm_\d+[af]?)\b")
#: bytes of one instruction; texts are padded to it
WORD = 16


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """(attribute, value) of each EIATTR record; a record that is cut off ends the list."""
    at = 0
    while at + 4 <= len(data):
        kind, attribute, value = struct.unpack_from("<BBH", data, at)
        at += 4
        if kind != _SVAL:
            yield attribute, data[at - 2 : at]
            continue
        if at + value > len(data):
            return
        yield attribute, data[at : at + value]
        at += value


def words(value: bytes) -> list[int]:
    """A record's value as 32-bit words."""
    return list(struct.unpack_from(f"<{len(value) // 4}I", value))


@dataclass
class Kernel:
    """One entry function.

    Attributes:
        name: mangled.
        code: its instructions, two little-endian 64-bit halves each.
        file_offset: of its code in the cubin.
        registers, frame, min_stack: as the compiler declares, bytes; None when it does not.
        cubin: where it lies.
    """

    name: str
    code: npt.NDArray[np.uint64]
    file_offset: int
    section: int
    cubin: Cubin = field(repr=False)
    registers: int | None = None
    frame: int | None = None
    min_stack: int | None = None

    @cached_property
    def info(self) -> dict[int, list[bytes]]:
        """Attribute -> values, from ``.nv.info.NAME``."""
        found: dict[int, list[bytes]] = {}
        index = self.cubin.info_sections.get(self.name)
        if index is not None:
            for attribute, value in records(self.cubin.elf.bytes_of(index)):
                found.setdefault(attribute, []).append(value)
        return found

    @property
    def externs(self) -> list[str]:
        """Names of the outside functions that it calls."""
        return [self.cubin.elf.symbol_name(index) for value in self.info.get(EXTERNS, ()) for index in words(value)]

    @property
    def syscall_offsets(self) -> list[int]:
        """Program counters at which it calls into the driver."""
        return [offset for value in self.info.get(SYSCALL_OFFSETS, ()) for offset in words(value)]

    @property
    def parameters(self) -> list[tuple[int, int, int]]:
        """(ordinal, offset, bytes) of each parameter, in order; offsets count from the start of the parameters."""
        found = []
        for value in self.info.get(KPARAM_INFO, ()):
            if len(value) >= 12:
                _, where, sizes = struct.unpack_from("<III", value)
                found.append((where & 0xFFFF, where >> 16, sizes >> 18))
        return sorted(found)

    @property
    def parameter_base(self) -> int | None:
        """Where the parameters start in constant bank 0."""
        values = self.info.get(PARAM_CBANK, ())
        return struct.unpack_from("<I", values[0], 4)[0] & 0xFFFF if values and len(values[0]) >= 8 else None


@dataclass
class Cubin:
    """One parsed cubin. ``arch`` is what the compiler was asked for, where it says so, else what the header or container says."""

    elf: Elf
    container_arch: str | None = None

    @cached_property
    def arch(self) -> str:
        """``"sm_100a"``."""
        for index, name in enumerate(self.elf.names):
            if name == ".note.nv.tkinfo" and (match := _TARGET.search(self.elf.bytes_of(index))):
                return match.group(1).decode("ascii")
        flags = self.elf.flags
        if self.elf.abi >= 8:
            own = f"sm_{flags >> 8 & 0xFFFF & 0xFF}{'a' if flags & 0x8 else ''}"
        else:
            own = f"sm_{flags & 0xFF}{'a' if flags & 0x800 else ''}"
        return self.container_arch if self.container_arch and self.container_arch.startswith(own) else own

    @cached_property
    def info_sections(self) -> dict[str, int]:
        """Kernel name -> index of its ``.nv.info`` section."""
        return {name[9:]: index for index, name in enumerate(self.elf.names) if name.startswith(".nv.info.")}

    @cached_property
    def undefined(self) -> set[str]:
        """Names of the functions that others must provide."""
        sections = self.elf.symbol_sections
        functions = (self.elf.symbols["info"] & 15 == _FUNC) & (sections == UNDEFINED)
        return {self.elf.symbol_name(int(index)) for index in np.flatnonzero(functions)}

    def kernels(self) -> list[Kernel]:
        """The entry functions, in the order of their code.

        Raises:
            MalformedError: a table or a text reaches beyond the file.
        """
        elf = self.elf
        symbols, sections = elf.symbols, elf.symbol_sections
        entries = np.flatnonzero((symbols["info"] & 15 == _FUNC) & (symbols["other"] & _ENTRY != 0) & (sections != UNDEFINED))
        declared = self._declared()
        found = []
        for index, section in zip(entries.tolist(), sections[entries].tolist(), strict=True):
            if section >= len(elf.sections) or int(elf.sections[section]["type"]) != PROGBITS:
                raise MalformedError(f"entry symbol {index} names section {section}, which holds no code")
            offset, size = elf.span(section)
            code = np.frombuffer(elf.data, "<u8", size // WORD * 2, offset)
            sizes = declared.get(index, {})
            name = elf.symbol_name(index)
            kernel = Kernel(
                name, code, offset, section, self, sizes.get(REGCOUNT), sizes.get(FRAME_SIZE), sizes.get(MIN_STACK_SIZE)
            )
            found.append(kernel)
        return sorted(found, key=lambda kernel: kernel.file_offset)

    def _declared(self) -> dict[int, dict[int, int]]:
        """Symbol index -> attribute -> value, from the records that hold for the whole cubin."""
        found: dict[int, dict[int, int]] = {}
        for index, name in enumerate(self.elf.names):
            if name != ".nv.info":
                continue
            for attribute, value in records(self.elf.bytes_of(index)):
                if attribute in (REGCOUNT, FRAME_SIZE, MIN_STACK_SIZE) and len(value) == 8:
                    symbol, number = words(value)
                    found.setdefault(symbol, {})[attribute] = number
        return found
