"""NVIDIA's fat binary container: a header and a list of entries, each one image of device code for one target.

Layout (little-endian), read from shipped libraries: container magic 0xBA55ED50, u16 version 1, u16 header size, u64 bytes of
entries. Entry: u16 kind (1 PTX, 2 ELF), u16 version, u32 header size, u64 payload with padding, u32 compressed bytes, two u32,
u16 minor, u16 major, u32 arch, u32 name offset, u32 name length, u64 flags, u64, u64 decompressed bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

import lz4.block
import zstandard

from blockscale.guard.audit.limits import Limits, MalformedError
from blockscale.guard.audit.readers.model import Codec, Image, NotChecked
from blockscale.guard.audit.readers.window import Window

MAGIC = b"\x50\xed\x55\xba"
CONTAINER = struct.Struct("<IHHQ")
ENTRY = struct.Struct("<HHIQIIHHIIIQQQ")
PTX, ELF = 1, 2
LZ4_FLAG, ZSTD_FLAG = 0x2000, 0x8000
ACCELERATED_FLAG, FAMILY_FLAG = 0x100000, 0x200000
#: headers of shipped files have 64 to 120 bytes
MAX_ENTRY_HEADER = 4096


def looks_like_container(head: bytes) -> bool:
    """Whether these bytes begin a container, and not a constant that happens to equal the magic."""
    if len(head) < CONTAINER.size:
        return False
    magic, version, header, size = CONTAINER.unpack_from(head)
    return magic == 0xBA55ED50 and version == 1 and CONTAINER.size <= header <= MAX_ENTRY_HEADER and ENTRY.size <= size < 1 << 48


def read_container(window: Window, file: str, limits: Limits) -> Iterator[Image | NotChecked]:
    """The images of the container at the window's position; moves behind it.

    Raises:
        MalformedError: an entry that is cut off or contradicts itself; what was read before it has been yielded.
    """
    _, _, header, size = CONTAINER.unpack(window.peek(CONTAINER.size))
    window.skip(header)
    end = window.position + size
    for _ in range(limits.entries):
        if end - window.position < ENTRY.size:
            window.skip(end - window.position)
            return
        yield from _read_entry(window, file, end, limits)
    raise MalformedError(f"more than {limits.entries:,} entries in one container")


def _read_entry(window: Window, file: str, end: int, limits: Limits) -> Iterator[Image | NotChecked]:
    at = window.position
    fields = ENTRY.unpack(window.peek(ENTRY.size).ljust(ENTRY.size, b"\0"))
    kind, _, header, padded, packed, _, _, _, number, _, _, flags, _, size = fields
    if not ENTRY.size <= header <= MAX_ENTRY_HEADER or padded > end - at - header:
        raise MalformedError(
            f"fatbin entry at {at:,} has a header of {header:,} and a payload of {padded:,} bytes; {end - at:,} are left"
        )
    arch = arch_name(number, flags)
    if kind not in (PTX, ELF):
        window.skip(header + padded)
        yield NotChecked(file, f"{arch} entry of kind {kind}", "neither cubin nor PTX (LTO intermediate code, an index)")
        return
    codec: Codec = "zstd" if flags & ZSTD_FLAG else "lz4" if flags & LZ4_FLAG else "raw"
    used = padded if codec == "raw" else packed
    if used > padded or used > limits.image_bytes:
        raise MalformedError(f"fatbin entry at {at:,} declares {used:,} bytes in a payload of {padded:,}")
    window.skip(header)
    offset = window.position
    data = window.take(used, "fatbin payload")
    window.skip(padded - used)
    yield Image(file, offset, "ptx" if kind == PTX else "cubin", arch, codec, used if codec == "raw" else size, data)


def arch_name(number: int, flags: int) -> str:
    """``"sm_100a"`` from an entry's arch and flags."""
    suffix = "a" if flags & ACCELERATED_FLAG else "f" if flags & FAMILY_FLAG else ""
    return f"sm_{number}{suffix}"


def decompress(image: Image, limits: Limits) -> bytes:
    """The image's bytes.

    Raises:
        MalformedError: beyond the limit, damaged, or of another size than declared.
    """
    limits.check_image(image.size, f"{image.codec} image at {image.offset:,}")
    if image.codec == "raw":
        return image.data
    try:
        data = _unzstd(image) if image.codec == "zstd" else _unlz4(image)
    except (zstandard.ZstdError, lz4.block.LZ4BlockError, ValueError, MemoryError) as error:
        raise MalformedError(f"{image.codec} image at {image.offset:,}: {error}") from error
    if len(data) != image.size:
        raise MalformedError(f"{image.codec} image at {image.offset:,} declares {image.size:,} bytes and holds {len(data):,}")
    return data


def _unzstd(image: Image) -> bytes:
    declared = zstandard.frame_content_size(image.data)
    # the frame's own size would overrule max_output_size
    if declared not in (-1, image.size):
        raise MalformedError(f"zstd frame declares {declared:,} bytes, its entry {image.size:,}")
    return zstandard.ZstdDecompressor().decompress(image.data, max_output_size=image.size)


def _unlz4(image: Image) -> bytes:
    # a block expands at most 255 times: refuse before memory is taken
    if image.size > 255 * len(image.data) + 64:
        raise MalformedError(f"{len(image.data):,} bytes of lz4 cannot hold {image.size:,}")
    return lz4.block.decompress(image.data, uncompressed_size=image.size)
