"""Real text as bytes: the running interpreter's own library sources, or what ``--data`` names; and batches of it.

The vocabulary is the 256 bytes, so there is no tokenizer. Letters: B batch, T context.
"""

from __future__ import annotations

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

# Folders of the standard library that differ between distributions of the same Python, or are not its own text.
_SKIPPED = frozenset({"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"})
STANDARD_LIBRARY = "the Python standard library's own sources"


class DataError(ValueError):
    """The data cannot be used; the message names the path and what would do."""


@dataclass(frozen=True)
class Corpus:
    """Training and validation bytes (uint8, on the CPU) and where they come from. ``sha256`` covers both parts."""

    @dataclass(frozen=True)
    class Config:
        """``path``: a file, a folder, or None for the standard library. Every ``validation_every``-th file is held out."""

        path: str | None = None
        max_bytes: int = 64 * 2**20
        validation_every: int = 16

    training: torch.Tensor
    validation: torch.Tensor
    source: str
    files: int
    sha256: str
    split: str

    @classmethod
    def load(cls, config: Config) -> Corpus:
        """Read the files in the order of their relative names and split them.

        With at least two times ``validation_every`` files, every ``validation_every``-th is held out whole; with fewer, the
        last 1/``validation_every`` of the bytes is.

        Raises:
            DataError: the path is missing, or holds no bytes.
        """
        root, names = _find(config.path)
        every = config.validation_every
        by_file = len(names) >= 2 * every
        training, validation = bytearray(), bytearray()
        used = 0
        for name in names:
            room = config.max_bytes - len(training) - len(validation)
            if room <= 0:
                break
            held_out = by_file and used % every == every - 1
            (validation if held_out else training).extend((root / name).read_bytes()[:room])
            used += 1
        if not by_file:
            cut = len(training) - len(training) // every
            validation, training = training[cut:], training[:cut]
        source = STANDARD_LIBRARY if config.path is None else config.path
        if not training:
            raise DataError(f"data {source!r} is empty: {used} files with 0 bytes in all; name a file or folder that holds text")
        return cls(
            training=_as_tensor(training),
            validation=_as_tensor(validation),
            source=source,
            files=used,
            sha256=hashlib.sha256(training + validation).hexdigest(),
            split=f"every {every}th file" if by_file else f"the last 1/{every} of the bytes",
        )


@dataclass(frozen=True)
class Batches:
    """Which windows of the corpus each step sees. A step's batch depends on the seed and the step alone: no state to save,
    and nothing that a recipe draws can disturb it."""

    @dataclass(frozen=True)
    class Config:
        """``size`` windows of ``context`` bytes a step; ``validation`` fixed batches of the same shape."""

        size: int = 8
        context: int = 128
        validation: int = 8

    config: Config
    corpus: Corpus
    seed: int

    def __post_init__(self) -> None:
        window, least = self.config.context + 1, self.config.size * (self.config.context + 1)
        for name, data in (("training", self.corpus.training), ("validation", self.corpus.validation)):
            if data.numel() < least:
                raise DataError(
                    f"data {self.corpus.source!r} is too small: {data.numel()} bytes for {name} ({self.corpus.split} is held "
                    f"out), and one batch of {self.config.size} windows of {window} bytes needs {least}; name more text, or "
                    f"choose a smaller batch or context"
                )

    def starts(self, step: int) -> torch.Tensor:
        """int64 [B]: where the windows of ``step`` begin."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step)
        return torch.randint(self.corpus.training.numel() - self.config.context, (self.config.size,), generator=generator)

    def training(self, step: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(inputs, targets) of ``step``: int64 [B, T], the targets one byte further."""
        return _windows(self.corpus.training, self.starts(step), self.config.context, device)

    def validation(self, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """The same evenly spread windows every time, batch by batch."""
        count = self.config.validation * self.config.size
        last = self.corpus.validation.numel() - self.config.context - 1
        starts = torch.arange(count, dtype=torch.int64) * last // max(count - 1, 1)
        for chunk in starts.split(self.config.size):
            yield _windows(self.corpus.validation, chunk, self.config.context, device)


def _windows(data: torch.Tensor, starts: torch.Tensor, context: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    windows = data[starts[:, None] + torch.arange(context + 1)].to(device=device, dtype=torch.int64)
    return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def _as_tensor(data: bytearray) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _find(path: str | None) -> tuple[Path, list[str]]:
    """The root and the names below it, sorted as text so that every machine reads them in one order."""
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        names = [name for name in _names_below(root, "*.py") if _SKIPPED.isdisjoint(name.split("/"))]
        if not names:
            raise DataError("this Python comes without the sources of its standard library; name some text with --data")
        return root, names
    root = Path(path)
    if root.is_file():
        return root.parent, [root.name]
    if not root.is_dir():
        raise DataError(f"data {path!r} does not exist: name a file or a folder")
    names = [name for name in _names_below(root, "*") if not any(part.startswith(".") for part in name.split("/"))]
    if not names:
        raise DataError(f"data {path!r} is a folder without files (hidden ones aside): name a file or folder that holds text")
    return root, names


def _names_below(root: Path, pattern: str) -> list[str]:
    return sorted(file.relative_to(root).as_posix() for file in root.rglob(pattern) if file.is_file())
