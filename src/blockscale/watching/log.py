"""The JSON-lines log: a line a step, and one for whatever was found.

Each line is one write of one object with an ``event`` ("start", "step", "finding", "end"); a process that dies leaves at most
its last line short, which :func:`read_log` leaves out.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any


def ranked(path: str | Path, rank: int, ranks: int) -> Path:
    """The path of one rank of several: ``watch.jsonl -> watch.rank3.jsonl``."""
    path = Path(path)
    return path if ranks == 1 else path.with_name(f"{path.stem}.rank{rank}{path.suffix}")


class Log:
    """Appends to a file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.stat().st_size > 0 and not _ends_whole(path)
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        if torn:  # a line that a dying process left short must not swallow the next one
            os.write(self._file, b"\n")

    def write(self, event: str, **values: Any) -> None:
        """One line of values that JSON knows."""
        line = json.dumps({"event": event, "time": round(time.time(), 3), **values}, allow_nan=False)
        data = memoryview((line + "\n").encode())
        while data:
            data = data[os.write(self._file, data) :]

    def close(self) -> None:
        """Nothing more."""
        os.close(self._file)


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read() == b"\n"


def read_log(path: str | Path) -> list[dict[str, Any]]:
    """The objects of a log, in order; lines that are no whole object are left out."""
    found = []
    for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            value = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            found.append(value)
    return found
