"""Compiles the C++ in ``csrc`` with the system's compiler on first use, once a machine and user, and loads it.

The result lies in the user's cache, under a name made of the sources, the flags, the compiler and the processor, so a
stale or foreign one is never loaded. Of processes that need it at once, one compiles and the others wait for it. Without a
compiler, or where the cache cannot be written, there is no library and :func:`load` says why.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

SOURCES = Path(__file__).parent / "csrc"
COMPILERS = ("c++", "g++", "clang++")
#: no contraction, no fast-math: every float operation is one IEEE rounding
FLAGS = ("-O3", "-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", "-Wno-psabi", "-pthread")
#: the first that the compiler takes
TARGETS = (("-march=native", "-mprefer-vector-width=512"), ("-march=native",), ("-mcpu=native",), ())


@dataclass(frozen=True)
class Loaded:
    """The library, or None, and why."""

    library: ctypes.CDLL | None
    why: str


@lru_cache(maxsize=1)
def load() -> Loaded:
    """The compiled library, made if need be (a few seconds, once)."""
    compiler = next((path for name in (os.environ.get("CXX", ""), *COMPILERS) if name and (path := shutil.which(name))), None)
    if compiler is None:
        return Loaded(None, f"no C++ compiler found (looked for {', '.join(COMPILERS)})")
    try:
        return Loaded(ctypes.CDLL(str(_built(compiler))), f"compiled by {Path(compiler).name} for this processor")
    except (OSError, ImportError, subprocess.SubprocessError, RuntimeError) as error:
        return Loaded(None, f"the C++ kernels could not be built: {error}")


def cache_folder() -> Path:
    """Where compiled libraries are kept: ``$XDG_CACHE_HOME/blockscale`` or ``~/.cache/blockscale``."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "blockscale"


def _built(compiler: str) -> Path:
    folder = cache_folder()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    path = folder / f"cpu-{_key(compiler)}.so"
    if path.exists():
        return path
    with _alone(folder):
        if not path.exists():
            with tempfile.TemporaryDirectory(dir=folder) as work:
                _compile(compiler, made := Path(work) / path.name)
                os.replace(made, path)  # whole or not at all, even where files cannot be locked
    return path


@contextlib.contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """Wait until no other process builds here; the lock goes with the process that holds it."""
    import fcntl  # not on every system, and only needed to build

    with open(folder / "lock", "w") as lock:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(compiler: str) -> str:
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    parts = [version, repr((FLAGS, TARGETS)), platform.machine(), _processor()]
    parts += [file.name + "\n" + file.read_text() for file in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _processor() -> str:
    """What the processor can do, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(next((line for line in lines if line.startswith(name)), "") for name in ("flags", "Features", "model name"))


def _compile(compiler: str, made: Path) -> None:
    sources = [str(file) for file in sorted(SOURCES.glob("*.cpp"))]
    for target in TARGETS:
        command = [compiler, *FLAGS, *target, "-o", str(made), *sources]
        done = subprocess.run(command, capture_output=True, text=True, timeout=600)
        if done.returncode == 0:
            return
    raise RuntimeError(f"{compiler} failed: {done.stderr.strip()[:400]}")
