"""Files that are either the old ones or the new ones, never half of one."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_bytes(path: str | Path, data: bytes) -> Path:
    """Write ``data`` to a temporary name in the same folder, flush it to the disk, and rename it to ``path``.

    Returns:
        ``path``. An error or a kill before the rename leaves what was there before.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def write_text(path: str | Path, text: str) -> Path:
    """`write_bytes` of UTF-8 text."""
    return write_bytes(path, text.encode("utf-8"))


def write_json(path: str | Path, value: Any) -> Path:
    """`write_text` of ``value`` as indented JSON (see `to_jsonable`)."""
    return write_text(path, json.dumps(to_jsonable(value), indent=2, allow_nan=False) + "\n")


def to_jsonable(value: Any) -> Any:
    """``value`` as JSON types: dataclasses become objects, tuples lists, paths text, NaN and infinities null.

    Raises:
        TypeError: a type that has no JSON form.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Path):
        return str(value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): to_jsonable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_jsonable(item) for item in value]
    raise TypeError(f"value {value!r} of type {type(value).__name__} has no JSON form")


def _umask() -> int:
    current = os.umask(0)
    os.umask(current)
    return current
