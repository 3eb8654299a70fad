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
        image_bytes: one code image (cubin or PTX) after decompression; a worker holds at most one. The largest in a library
            that was looked at has 71 MiB.
        file_bytes: everything that one file may decompress to, all its images together.
        entries: code images and archive members of one file.
        memory_bytes: what the run may take beyond the interpreter: see `for_memory`, and `engine` for each worker's share.
    """

    image_bytes: int = 256 * MIB
    file_bytes: int = 256 * 1024 * MIB
    entries: int = 1_000_000
    memory_bytes: int = 2048 * MIB

    @classmethod
    def for_memory(cls, memory_bytes: int) -> Limits:
        """Limits for a run in so many bytes: an eighth for one image, a quarter for what waits for the workers.

        Raises:
            ValueError: less than 128 MiB.
        """
        if memory_bytes < 128 * MIB:
            raise ValueError(f"memory_bytes = {memory_bytes:,}: at least {128 * MIB:,}")
        return cls(image_bytes=memory_bytes // 8, memory_bytes=memory_bytes)

    @property
    def waiting_bytes(self) -> int:
        """What may wait for the workers: units as they were read, still compressed."""
        return self.memory_bytes // 4

    def check_image(self, size: int, what: str) -> None:
        """Raises:
        MalformedError: ``size`` is beyond ``image_bytes``.
        """
        if size > self.image_bytes:
            raise MalformedError(f"{what} declares {size:,} bytes; the limit is {self.image_bytes:,}")
