"""The part of ELF64 that a cubin needs: sections, names, symbols. Every offset is checked before it is followed."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

from blockscale.guard.audit.limits import MalformedError

HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
SECTION = np.dtype(
    [
        ("name", "<u4"),
        ("type", "<u4"),
        ("flags", "<u8"),
        ("addr", "<u8"),
        ("offset", "<u8"),
        ("size", "<u8"),
        ("link", "<u4"),
        ("info", "<u4"),
        ("align", "<u8"),
        ("entsize", "<u8"),
    ]
)
SYMBOL = np.dtype([("name", "<u4"), ("info", "u1"), ("other", "u1"), ("shndx", "<u2"), ("value", "<u8"), ("size", "<u8")])
PROGBITS, SYMTAB, NOBITS, SYMTAB_SHNDX = 1, 2, 8, 18
UNDEFINED, EXTENDED_INDEX = 0, 0xFFFF
EM_CUDA = 190
MAX_NAME = 1 << 16


@dataclass
class Elf:
    """One ELF file in memory.

    Attributes:
        data: the bytes.
        flags: ``e_flags``.
        abi: ``e_ident[8]``.
        sections: one `SECTION` record each.
    """

    data: bytes
    flags: int = 0
    abi: int = 0
    sections: npt.NDArray[np.void] = field(default_factory=lambda: np.zeros(0, SECTION))
    _names: tuple[int, int] = (0, 0)

    @classmethod
    def parse(cls, data: bytes) -> Elf:
        """Reads header and section table.

        Raises:
            MalformedError: not a CUDA ELF file, or its tables lie outside.
        """
        if len(data) < HEADER.size:
            raise MalformedError(f"{len(data)} bytes are no ELF file")
        ident, _, machine, _, _, _, shoff, flags, _, _, _, shentsize, shnum, shstrndx = HEADER.unpack_from(data)
        if ident[:6] != b"\x7fELF\x02\x01" or machine != EM_CUDA:
            raise MalformedError("not a 64-bit little-endian CUDA ELF file")
        if shentsize != SECTION.itemsize or shoff + SECTION.itemsize > len(data):
            raise MalformedError(f"section table of {shentsize}-byte entries at {shoff:,} in {len(data):,} bytes")
        first = np.frombuffer(data, SECTION, 1, shoff)[0]
        count = shnum or int(first["size"])
        strings = int(first["link"]) if shstrndx == EXTENDED_INDEX else shstrndx
        if count > (len(data) - shoff) // SECTION.itemsize:
            raise MalformedError(f"{count:,} sections at {shoff:,} in {len(data):,} bytes")
        elf = cls(data, flags, ident[8], np.frombuffer(data, SECTION, count, shoff))
        elf._names = elf.span(strings)
        return elf

    def span(self, index: int) -> tuple[int, int]:
        """(offset, size) of a section's bytes, (0, 0) for one without bytes.

        Raises:
            MalformedError: no such section, or it reaches beyond the file.
        """
        if not 0 <= index < len(self.sections):
            raise MalformedError(f"section {index} of {len(self.sections)}")
        section = self.sections[index]
        if int(section["type"]) == NOBITS:
            return 0, 0
        offset, size = int(section["offset"]), int(section["size"])
        if offset > len(self.data) or size > len(self.data) - offset:
            raise MalformedError(f"section {index} spans {offset:,} + {size:,} of {len(self.data):,} bytes")
        return offset, size

    def bytes_of(self, index: int) -> bytes:
        """A section's bytes.

        Raises:
            MalformedError: as `span`.
        """
        offset, size = self.span(index)
        return self.data[offset : offset + size]

    def string(self, table: tuple[int, int], at: int) -> str:
        """The zero-terminated string at ``at`` of a string table's span.

        Raises:
            MalformedError: outside of the table, or longer than 64 KiB.
        """
        offset, size = table
        if at >= size:
            raise MalformedError(f"name at {at:,} of a string table of {size:,} bytes")
        end = self.data.find(b"\0", offset + at, min(offset + size, offset + at + MAX_NAME))
        if end < 0:
            raise MalformedError(f"name at {at:,} does not end")
        return self.data[offset + at : end].decode("utf-8", "replace")

    @cached_property
    def names(self) -> list[str]:
        """The section names, in order.

        Raises:
            MalformedError: as `string`.
        """
        start, size = self._names
        table = self.data[start : start + size]
        found = []
        for at in self.sections["name"].tolist():
            end = table.find(b"\0", at, at + MAX_NAME)
            if end < 0:
                raise MalformedError(f"name at {at:,} of a string table of {size:,} bytes does not end in it")
            found.append(table[at:end].decode("utf-8", "replace"))
        return found

    @cached_property
    def symbols(self) -> npt.NDArray[np.void]:
        """The symbol table, empty when there is none."""
        found = np.flatnonzero(self.sections["type"] == SYMTAB)
        if not len(found):
            return np.zeros(0, SYMBOL)
        offset, size = self.span(int(found[0]))
        return np.frombuffer(self.data, SYMBOL, size // SYMBOL.itemsize, offset)

    @cached_property
    def symbol_sections(self) -> npt.NDArray[np.uint32]:
        """The section index of each symbol; files of more than 65,279 sections keep it in a table of its own."""
        index = self.symbols["shndx"].astype(np.uint32)
        found = np.flatnonzero(self.sections["type"] == SYMTAB_SHNDX)
        if len(found):
            offset, size = self.span(int(found[0]))
            wide = np.frombuffer(self.data, "<u4", size // 4, offset)
            count = min(len(wide), len(index))
            index[:count] = np.where(index[:count] == EXTENDED_INDEX, wide[:count], index[:count])
        return index

    def symbol_name(self, index: int) -> str:
        """Name of a symbol.

        Raises:
            MalformedError: no such symbol, or as `string`.
        """
        if not 0 <= index < len(self.symbols):
            raise MalformedError(f"symbol {index} of {len(self.symbols)}")
        return self.string(self._symbol_strings, self._symbol_names[index])

    @cached_property
    def _symbol_strings(self) -> tuple[int, int]:
        found = np.flatnonzero(self.sections["type"] == SYMTAB)
        return self.span(int(self.sections[found[0]]["link"]))

    @cached_property
    def _symbol_names(self) -> list[int]:
        return self.symbols["name"].tolist()
