"""A forward-only view of a byte stream: look ahead, take, skip, search. Holds a bounded part of the stream."""

from __future__ import annotations

import re
from typing import Protocol

from blockscale.guard.audit.limits import MalformedError

CHUNK = 4 << 20


class Stream(Protocol):
    """Anything that reads bytes forward."""

    def read(self, size: int, /) -> bytes:
        """At most ``size`` bytes; empty at the end."""


class Window:
    """``position`` is the offset in the stream of the first byte that has not been taken."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._buffer = b""
        self._start = 0
        self._ended = False
        self.position = 0

    def peek(self, size: int) -> bytes:
        """The next ``size`` bytes, fewer at the end of the stream; they stay."""
        self._fill(size)
        return self._buffer[self._start : self._start + size]

    def take(self, size: int, what: str) -> bytes:
        """The next ``size`` bytes.

        Raises:
            MalformedError: the stream ends before.
        """
        data = self.peek(size)
        if len(data) < size:
            raise MalformedError(f"{what} at {self.position:,} needs {size:,} bytes; {len(data):,} are left")
        self._advance(size)
        return data

    def skip(self, size: int) -> None:
        """Drops ``size`` bytes, fewer at the end of the stream, without holding them."""
        while size > 0:
            self._fill(1)
            step = min(size, len(self._buffer) - self._start)
            if step == 0:
                return
            self._advance(step)
            size -= step

    def seek_pattern(self, pattern: re.Pattern[bytes], overlap: int) -> bool:
        """Moves to the next match; ``overlap``: the longest match less one. False, at the end, when there is none."""
        while True:
            self._fill(overlap + 1)
            match = pattern.search(self._buffer, self._start)
            if match:
                self._advance(match.start() - self._start)
                return True
            if self._ended:
                self._advance(len(self._buffer) - self._start)
                return False
            self._advance(len(self._buffer) - self._start - overlap)

    def _advance(self, size: int) -> None:
        self._start += size
        self.position += size

    def _fill(self, size: int) -> None:
        have = len(self._buffer) - self._start
        if have >= size or self._ended:
            return
        parts = [self._buffer[self._start :]]
        while have < size:
            # a lying size costs no more than the stream really holds
            part = self._stream.read(CHUNK)
            if not part:
                self._ended = True
                break
            parts.append(part)
            have += len(part)
        self._buffer, self._start = b"".join(parts), 0
