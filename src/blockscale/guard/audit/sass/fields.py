"""Fields of 128-bit instructions, whole arrays at a time.

A text is an array of 64-bit halves: instruction i is ``code[2 * i]`` (bits 0-63) and ``code[2 * i + 1]`` (bits 64-127). The
low 12 bits name the operation and the form of its operands, bits 12-15 the guard predicate (7 is always true, bit 15
negates).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.uint64]
Ints = npt.NDArray[np.int64]

_ALWAYS, _NEVER = 7, 15


def words_of(data: bytes) -> Words:
    """The 64-bit halves of the whole instructions in ``data``."""
    return np.frombuffer(data, "<u8", len(data) // 16 * 2)


def opcodes(code: Words) -> npt.NDArray[np.uint16]:
    """The 12-bit operation of each instruction."""
    return code.view(np.uint16)[::8] & np.uint16(0xFFF)


def guards(low: Words) -> npt.NDArray[np.uint8]:
    """Bits 12-15."""
    return ((low >> np.uint64(12)) & np.uint64(15)).astype(np.uint8)


def always(low: Words) -> npt.NDArray[np.bool_]:
    """Whether the guard is the constant true."""
    return guards(low) == _ALWAYS


def never(low: Words) -> npt.NDArray[np.bool_]:
    """Whether the guard is the constant false: the instruction does nothing."""
    return guards(low) == _NEVER


def relative_targets(index: Ints, low: Words, high: Words) -> Ints:
    """Instruction index that each branch jumps to: pc + 16 + 4 * (bits 34-81, bits 16-23)."""
    upper = ((low >> np.uint64(34)) | ((high & np.uint64(0x3FFFF)) << np.uint64(30))).astype(np.int64)
    upper = (upper ^ (1 << 47)) - (1 << 47)
    offset = (upper << 8) | ((low >> np.uint64(16)) & np.uint64(0xFF)).astype(np.int64)
    return index + 1 + (offset >> 2)


def field(value: Words, at: int, width: int) -> Ints:
    """Bits ``at`` .. ``at + width - 1`` of each half."""
    return ((value >> np.uint64(at)) & np.uint64((1 << width) - 1)).astype(np.int64)
