"""What a user may name: a file, a folder, an installed package, a cache, a process. Each becomes a list of files."""

from __future__ import annotations

import getpass
import importlib.metadata
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

from blockscale.guard.audit.readers.model import NotChecked

#: longest list of mapped files that is believed of a process
_MAX_MAPS = 100_000


class UnknownTargetError(ValueError):
    """Neither a path, nor an installed package, nor a cache."""


def cache_folders() -> dict[str, Path]:
    """Name -> folder of the caches that hold compiled kernels, where their owners keep them by default."""
    home, user = Path.home(), getpass.getuser()
    temporary = Path(tempfile.gettempdir())
    return {
        "triton-cache": Path(
            os.environ.get("TRITON_CACHE_DIR") or Path(os.environ.get("TRITON_HOME") or home) / ".triton" / "cache"
        ),
        "inductor-cache": Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or temporary / f"torchinductor_{user}"),
        "cute-cache": Path(os.environ.get("CUTE_DSL_CACHE_DIR") or temporary / user / "cutlass_python_cache"),
        "flashinfer-cache": Path(os.environ.get("FLASHINFER_WORKSPACE_BASE") or home) / ".cache" / "flashinfer",
    }


def resolve(target: str) -> Iterator[Path | NotChecked]:
    """The files behind a target.

    Raises:
        UnknownTargetError: nothing of that name.
    """
    path = Path(target)
    if path.exists():
        yield from walk(path)
        return
    if target in (caches := cache_folders()):
        if not caches[target].is_dir():
            raise UnknownTargetError(f"{target}: {caches[target]} is not a folder")
        yield from walk(caches[target])
        return
    try:
        files = importlib.metadata.distribution(target).files or []
    except (importlib.metadata.PackageNotFoundError, ValueError) as error:
        names = ", ".join(caches)
        raise UnknownTargetError(f"{target!r} is no file, no folder, no installed package and no cache ({names})") from error
    for file in files:
        located = Path(str(file.locate()))
        if located.is_file():
            yield located


def walk(path: Path) -> Iterator[Path | NotChecked]:
    """The regular files below a folder in a fixed order, or the file itself. Links to folders are not followed."""
    if path.is_file():
        yield path
        return
    if not path.is_dir():
        yield NotChecked(str(path), "special file", "not a regular file", error=True)
        return
    for folder, folders, names in os.walk(path, onerror=None):
        folders.sort()
        for name in sorted(names):
            file = Path(folder, name)
            if file.is_file():
                yield file


def mapped_files(pid: int) -> Iterator[Path | NotChecked]:
    """The files that a running process has mapped, seen through its own root (it may live in a container).

    Raises:
        UnknownTargetError: no such process, or no right to look at it.
    """
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError as error:
        raise UnknownTargetError(f"process {pid}: {error.strerror}") from error
    names = sorted({match.group(1) for line in lines[:_MAX_MAPS] if (match := re.search(r"\s(/.*)$", line))})
    for name in names:
        if name.startswith(("/dev/", "/memfd:", "/SYSV", "/proc/", "/sys/")):
            continue
        if name.endswith(" (deleted)"):
            yield NotChecked(name, "mapped file", "deleted from disk while the process runs")
            continue
        path = Path(f"/proc/{pid}/root{name}")
        yield path if path.is_file() else NotChecked(name, "mapped file", "cannot be opened")
