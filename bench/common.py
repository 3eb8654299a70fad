"""What the benchmarks share: arms timed in turn, copy bandwidth, peak memory, and one writer of results.

Run with two threads unless told otherwise: ``OMP_NUM_THREADS=2 python bench/cpu_quantize.py``. On a machine that others use,
noise comes in bursts; arms take turns within a round, so a burst hits all of them, and ratios are those of the fastest and of
the median rounds.
"""

from __future__ import annotations

import ctypes
import gc
import os
import platform
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from blockscale.report.environment import describe_environment, package_version
from blockscale.report.write import write_json, write_text

RESULTS = Path(__file__).parent / "results"
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


@dataclass
class Arm:
    """One thing that is timed: a name, a call, and the seconds of each round."""

    name: str
    call: Callable[[], Any]
    seconds: list[float] = field(default_factory=list)

    @property
    def best(self) -> float:
        """Seconds of the fastest round."""
        return min(self.seconds)

    @property
    def median(self) -> float:
        """Seconds of the median round."""
        return statistics.median(self.seconds)


def interleave(arms: list[Arm], rounds: int) -> None:
    """Time each arm once a round, after one round that is not counted. Results are freed outside the timed part."""
    for number in range(rounds + 1):
        for arm in arms:
            gc.collect()
            start = time.perf_counter()
            result = arm.call()
            elapsed = time.perf_counter() - start
            del result
            if number:
                arm.seconds.append(elapsed)


def ratio(slow: Arm, fast: Arm) -> dict[str, float]:
    """How many times longer ``slow`` takes, by the fastest and by the median rounds."""
    return {"best": slow.best / fast.best, "median": slow.median / fast.median}


def copy_arm(elements: int) -> Arm:
    """A copy of a bfloat16 tensor into memory that is there: what the machine can move, twice ``2 * elements`` bytes."""
    source, target = torch.randn(elements).bfloat16(), torch.zeros(elements, dtype=torch.bfloat16)
    return Arm("copy", lambda: target.copy_(source))


def peak_memory(call: Callable[[], Any], inputs: int) -> dict[str, float]:
    """The most that was resident during a call, above what was resident before it without the inputs.

    Measured by the system: VmHWM of /proc/self/status, set back just before the call through /proc/self/clear_refs, after free
    memory went back to the system (malloc_trim), so that what the call takes is seen even where it was used before. Linux only.

    Returns:
        peak_bytes; least_bytes (inputs + outputs); overhead, peak / least - 1. The call must return its outputs in a list.
    """
    gc.collect()
    call()  # code, threads and caches that a first call makes
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = _status("VmRSS")
    CLEAR.write_text("5")
    outputs = call()
    peak = _status("VmHWM") - before + inputs
    least = inputs + sum(t.nbytes for t in outputs)
    return {"peak_bytes": peak, "least_bytes": least, "overhead": peak / least - 1}


def _status(name: str) -> int:
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name + ":"))
    return int(line.split()[1]) * 1024


def environment(packages: tuple[str, ...] = ()) -> dict[str, str]:
    """Machine, versions, commit, command and load."""
    model = next(
        (line.split(":")[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.processor()
    )
    commit = _git("rev-parse", "HEAD") + (" with changes" if _git("status", "--porcelain", "--", "src", "bench/*.py") else "")
    return {
        **describe_environment(torch.device("cpu")),
        "processor": model,
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": next((line.split(":")[1].strip() for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), ""),
        **{name: package_version(name) or "not installed" for name in packages},
        "commit": commit,
        "command": shlex.join(["python", *sys.argv]),
        "load": (_lines("/proc/loadavg") or [""])[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def _git(*arguments: str) -> str:
    done = subprocess.run(["git", *arguments], cwd=Path(__file__).parents[1], capture_output=True, text=True)
    return done.stdout.strip()


def write(name: str, title: str, found: dict[str, Any], rows: list[list[str]], notes: list[str], about: dict[str, str]) -> None:
    """``results/NAME.json`` with everything; ``results/NAME.md`` with a table (first row: heads) and notes, printed too."""
    load, cores = float((about["load"] or "0").split()[0]), int(about["cores"])
    if load > cores + 0.5:
        notes = [
            *notes,
            f"others used the machine (load {load} on {cores} cores): times too long, ratios uncertain; repeat when it is idle",
        ]
    lines = [f"# {title}", ""]
    lines += ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    lines += ["| " + " | ".join(row) + " |" for row in rows[1:]]
    lines += ["", *(f"- {note}" for note in notes), "", *(f"- {key}: {value}" for key, value in about.items()), ""]
    text = "\n".join(lines)
    write_json(RESULTS / f"{name}.json", {"environment": about, **found})
    write_text(RESULTS / f"{name}.md", text)
    print(text)


def verdict(what: str, value: float, bound: float, at_least: bool, unit: str = "x") -> str:
    """A sentence on one demand."""
    met = "met" if (value >= bound if at_least else value <= bound) else "NOT met"
    return f"{what}: {value:.2f}{unit}, demanded at {'least' if at_least else 'most'} {bound:g}{unit}: {met}"
