"""What a reader accepts from untrusted input, and the error that says which bound was broken."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


class MalformedError(ValueError):
    """An input that is damaged, truncated or beyond a limit. Ends the piece that it is about, never the run."""


@dataclass(frozen=True)
class Limits:
    """Bounds on one piece of input. Sizes are in bytes.

    Attributes:
        image_bytes: one code image (cubin or PTX) after decompression; a worker holds at most one.
        file_bytes: everything that one file may decompress to, all its images together.
        entries: code images and archive members of one file.
        memory_bytes: the whole run; it decides how much waits for the workers.
    """

    image_bytes: int = 512 * MIB
    file_bytes: int = 256 * 1024 * MIB
    entries: int = 1_000_000
    memory_bytes: int = 2048 * MIB

    def check_image(self, size: int, what: str) -> None:
        """Raises:
        MalformedError: ``size`` is beyond ``image_bytes``.
        """
        if size > self.image_bytes:
            raise MalformedError(f"{what} declares {size:,} bytes; the limit is {self.image_bytes:,}")
