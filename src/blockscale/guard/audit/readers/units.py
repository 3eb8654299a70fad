"""Cuts files into units of work for the processes: small ones are named and read there, large ones are read here, in order.

Nothing is unpacked to disk: an archive's members are inflated as they are scanned.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from blockscale.guard.audit.limits import Limits, MalformedError
from blockscale.guard.audit.readers.model import Image, NotChecked
from blockscale.guard.audit.readers.scan import scan
from blockscale.guard.audit.readers.window import Stream

#: a file or member up to this size is read by the process that audits it
SMALL = 8 << 20
#: bytes of files, members or images in one unit
BATCH = 4 << 20
_READ_ERRORS = (OSError, zipfile.BadZipFile, zlib.error, RuntimeError, NotImplementedError, EOFError, MalformedError, ValueError)


@dataclass(frozen=True)
class Files:
    """Small files, to be read by the worker."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class Members:
    """Small members of an archive, to be inflated by the worker."""

    archive: str
    names: tuple[str, ...]


@dataclass(frozen=True)
class Images:
    """Images that were found in a large file, still compressed."""

    images: tuple[Image, ...]


Unit = Files | Members | Images


def weight(unit: Unit) -> int:
    """Bytes that the unit holds while it waits."""
    return sum(len(image.data) for image in unit.images) if isinstance(unit, Images) else 0


class _Bounded:
    """A stream that refuses to deliver more than the limit, so that an archive's bomb ends."""

    def __init__(self, stream: Stream, limits: Limits) -> None:
        self._stream, self._left = stream, limits.file_bytes

    def read(self, size: int, /) -> bytes:
        data = self._stream.read(size)
        self._left -= len(data)
        if self._left < 0:
            raise MalformedError("decompresses to more than the limit of one file")
        return data


def plan(found: Iterable[Path | NotChecked], limits: Limits) -> Iterator[Unit | NotChecked]:
    """Units in the order of the files. Files that cannot be opened become `NotChecked`."""
    small: list[str] = []
    total = 0
    for item in found:
        if isinstance(item, NotChecked):
            yield item
            continue
        try:
            size, archive = item.stat().st_size, zipfile.is_zipfile(item)
        except OSError as error:
            yield NotChecked(str(item), "file", error.strerror or str(error), error=True)
            continue
        if archive:
            yield from _plan_archive(item, limits)
        elif size > SMALL:
            yield from _plan_file(item, limits)
        else:
            small.append(str(item))
            total += size
            if total >= BATCH or len(small) >= 256:
                yield Files(tuple(small))
                small, total = [], 0
    if small:
        yield Files(tuple(small))


def read(unit: Unit, limits: Limits) -> Iterator[Image | NotChecked]:
    """The images of a unit; runs in a worker."""
    if isinstance(unit, Images):
        yield from unit.images
    elif isinstance(unit, Files):
        for path in unit.paths:
            yield from _read_file(Path(path), limits)
    else:
        archive = _open_archive(unit.archive)
        for name in unit.names:
            yield from _read_member(archive, unit.archive, name, limits)


@lru_cache(maxsize=1)
def _open_archive(path: str) -> zipfile.ZipFile:
    """The archive of the last unit stays open: a directory of 16,000 members takes longer to read than a unit."""
    return zipfile.ZipFile(path)


def _read_file(path: Path, limits: Limits) -> Iterator[Image | NotChecked]:
    try:
        with path.open("rb", buffering=0) as stream:
            yield from scan(_Bounded(stream, limits), str(path), limits)
    except _READ_ERRORS as error:
        yield NotChecked(str(path), "file", str(error), error=True)


def _read_member(archive: zipfile.ZipFile, file: str, name: str, limits: Limits) -> Iterator[Image | NotChecked]:
    label = f"{file}!/{name}"
    try:
        with archive.open(name) as stream:
            yield from scan(_Bounded(stream, limits), label, limits)
    except _READ_ERRORS as error:
        yield NotChecked(label, "member", str(error), error=True)


def _plan_file(path: Path, limits: Limits) -> Iterator[Unit | NotChecked]:
    yield from _batches(_read_file(path, limits))


def _plan_archive(path: Path, limits: Limits) -> Iterator[Unit | NotChecked]:
    try:
        with zipfile.ZipFile(path) as archive:
            members = [info for info in archive.infolist() if not info.is_dir() and info.file_size]
            if len(members) > limits.entries:
                raise MalformedError(f"{len(members):,} members; the limit is {limits.entries:,}")
            yield from _small_members(str(path), [info for info in members if info.file_size <= SMALL])
            for info in members:
                if info.file_size > SMALL:
                    yield from _batches(_read_member(archive, str(path), info.filename, limits))
    except _READ_ERRORS as error:
        yield NotChecked(str(path), "archive", str(error), error=True)


def _small_members(archive: str, members: list[zipfile.ZipInfo]) -> Iterator[Unit]:
    names: list[str] = []
    size = 0
    for info in members:
        names.append(info.filename)
        size += info.file_size
        if size >= BATCH or len(names) >= 256:
            yield Members(archive, tuple(names))
            names, size = [], 0
    if names:
        yield Members(archive, tuple(names))


def _batches(items: Iterator[Image | NotChecked]) -> Iterator[Unit | NotChecked]:
    """Images in units of at least `BATCH` declared bytes."""
    batch: list[Image] = []
    size = 0
    for item in items:
        if isinstance(item, NotChecked):
            yield item
            continue
        batch.append(item)
        size += item.size
        if size >= BATCH:
            yield Images(tuple(batch))
            batch, size = [], 0
    if batch:
        yield Images(tuple(batch))
