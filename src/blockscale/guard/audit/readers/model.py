"""What readers hand over: images of device code, and what they could not read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Codec = Literal["raw", "zstd", "lz4"]
Kind = Literal["cubin", "ptx"]


@dataclass(frozen=True)
class Image:
    """One cubin or PTX text, still compressed as it was found.

    Attributes:
        file: where, with ``!/`` between an archive and its member.
        offset: of the image's bytes in that file.
        arch: as the container says, ``"sm_100a"``; None for a bare image.
        codec: how ``data`` is compressed.
        size: bytes after decompression.
    """

    file: str
    offset: int
    kind: Kind
    arch: str | None
    codec: Codec
    size: int
    data: bytes


@dataclass(frozen=True)
class NotChecked:
    """Something that was seen and not audited, and why. ``count``: how many of the same kind in the same file."""

    file: str
    what: str
    why: str
    error: bool = False
    count: int = 1
