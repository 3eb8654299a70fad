"""Finds device code in any stream of bytes: fat binaries, cubins that stand alone, PTX.

The stream is searched for the magics instead of following ELF sections, so the same code reads shared libraries, static
archives, cubins kept in arrays (as TensorRT-LLM does) and pickled caches, forward only and without a copy on disk.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator

from blockscale.guard.audit.limits import Limits, MalformedError
from blockscale.guard.audit.readers.fatbin import MAGIC, looks_like_container, read_container
from blockscale.guard.audit.readers.model import Image, NotChecked
from blockscale.guard.audit.readers.window import Stream, Window

_STARTS = re.compile(re.escape(MAGIC) + rb"|\x7fELF\x02\x01")
_PTX_START = re.compile(rb"\.version[ \t]+\d+\.\d+")
_SPACE = re.compile(rb"[\s\0]*")
_PTX_TARGET = re.compile(rb"\.target\s+(sm_\w+)")
_ELF_HEADER = struct.Struct("<16sHHIQQQIHHHHHH")
_SECTION_HEADER = struct.Struct("<IIQQQQIIQQ")
EM_CUDA = 190
_NOBITS = 8
_ZIP_START = b"PK\x03\x04"


def scan(stream: Stream, file: str, limits: Limits) -> Iterator[Image | NotChecked]:
    """Every image in the stream, and what was seen but cannot be read. Never raises for what the bytes say."""
    window = Window(stream)
    head = window.peek(64 << 10)
    if head.startswith(_ZIP_START):
        yield NotChecked(file, "archive", "an archive inside an archive is not opened; unpack it and audit the folder")
        return
    if is_ptx(head):
        yield from _ptx(window, file, head, limits)
        return
    try:
        while window.seek_pattern(_STARTS, 5):
            yield from _at_start(window, file, limits)
    except MalformedError as error:
        yield NotChecked(file, "rest of the file", str(error), error=True)


def is_ptx(head: bytes) -> bool:
    """Whether the first thing behind spaces and comments is PTX's version line. Linear: one pattern for it would backtrack."""
    at = 0
    while True:
        space = _SPACE.match(head, at)
        at = space.end() if space else at
        if head.startswith(b"//", at):
            end, width = head.find(b"\n", at), 1
        elif head.startswith(b"/*", at):
            end, width = head.find(b"*/", at + 2), 2
        else:
            return _PTX_START.match(head, at) is not None
        if end < 0:
            return False
        at = end + width


def _at_start(window: Window, file: str, limits: Limits) -> Iterator[Image | NotChecked]:
    head = window.peek(_ELF_HEADER.size)
    if head.startswith(MAGIC):
        if not looks_like_container(head):
            window.skip(1)
            return
        at = window.position
        try:
            yield from read_container(window, file, limits)
        except MalformedError as error:
            # goes on with the search behind what could be read
            yield NotChecked(file, f"rest of the fat binary at {at:,}", str(error), error=True)
            window.skip(1)
        return
    size = cubin_size(window, limits)
    if size is None:
        window.skip(1)
        return
    at = window.position
    yield Image(file, at, "cubin", None, "raw", size, window.take(size, "cubin"))


def cubin_size(window: Window, limits: Limits) -> int | None:
    """Bytes of the cubin at the window's position: the end of its last table or section; None for another ELF file.

    Raises:
        MalformedError: its header declares more than the limit.
    """
    head = window.peek(_ELF_HEADER.size)
    if len(head) < _ELF_HEADER.size:
        return None
    _, _, machine, _, _, phoff, shoff, _, _, phentsize, phnum, shentsize, shnum, _ = _ELF_HEADER.unpack(head)
    if machine != EM_CUDA or shentsize != _SECTION_HEADER.size:
        return None
    limits.check_image(shoff + shnum * shentsize, "cubin")
    if shnum == 0:
        first = window.peek(shoff + shentsize)[shoff:]
        if len(first) < shentsize:
            return None
        shnum = _SECTION_HEADER.unpack(first)[5]
    end = max(shoff + shnum * shentsize, phoff + phnum * phentsize)
    limits.check_image(end, "cubin")
    sections = window.peek(shoff + shnum * shentsize)[shoff:]
    # the table may lie before what it describes
    whole = len(sections) // shentsize * shentsize
    for _, kind, _, _, offset, size, _, _, _, _ in _SECTION_HEADER.iter_unpack(sections[:whole]):
        if kind != _NOBITS and offset + size > end:
            end = offset + size
    limits.check_image(end, "cubin")
    return end


def _ptx(window: Window, file: str, head: bytes, limits: Limits) -> Iterator[Image | NotChecked]:
    target = _PTX_TARGET.search(head)
    data = window.peek(limits.image_bytes + 1)
    if len(data) > limits.image_bytes:
        yield NotChecked(file, "PTX", f"longer than {limits.image_bytes:,} bytes", error=True)
        return
    yield Image(file, 0, "ptx", target.group(1).decode("ascii") if target else None, "raw", len(data), data)
