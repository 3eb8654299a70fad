"""Fuzz the audit's readers, decoder and rules with damaged input: no crash, nothing slower than a second, bounded memory.

``python bench/audit_fuzz.py 1000000`` writes bench/results/audit_fuzz.json. Input number i of a seed is always the same, so a
failure is repeated with ``--only I``. Inputs are cubins of the tests' fixtures, one kernel each and whole, alone and inside fat
binaries, zips and PTX; they are damaged where it matters: header fields, section and symbol tables, EIATTR records, fat binary
entries, instructions, lengths. Each worker may take 1 GiB of address space beyond what it starts with.
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import os
import random
import resource
import struct
import sys
import time
import traceback
import zipfile
from collections import Counter
from pathlib import Path
from typing import Any

import lz4.block
import zstandard

from blockscale.guard.audit.engine import Config, Result, Worker
from blockscale.guard.audit.limits import Limits
from blockscale.guard.audit.readers import Images, NotChecked
from blockscale.guard.audit.readers.fatbin import CONTAINER, ENTRY
from blockscale.guard.audit.readers.scan import scan
from blockscale.guard.audit.readers.units import SMALL
from blockscale.guard.audit.rules import RULES
from blockscale.report import write_json

ROOT = Path(__file__).parents[1]
LIMITS = Limits.for_memory(512 << 20)
GIB = 1 << 30
SLOW_SECONDS = 1.0
#: values that break length checks
EDGES = (0, 1, 7, 8, 15, 16, 63, 64, 127, 255, 256, 0x7FFF, 0xFFFF, 0x10000, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40)
EDGES += ((1 << 63) - 1, (1 << 64) - 1)


def entry(data: bytes, *, kind: int = 2, flags: int = 0x100000, packed: int = 0, size: int = 0) -> bytes:
    """A fat binary entry."""
    padded = data + b"\0" * (-len(data) % 8)
    return ENTRY.pack(kind, 0x101, ENTRY.size, len(padded), packed, 0, 8, 1, 90, 0, 0, flags | 0x11, 0, size) + padded


def container(*entries: bytes) -> bytes:
    """A fat binary."""
    body = b"".join(entries)
    return CONTAINER.pack(0xBA55ED50, 1, 16, len(body)) + body


def cubins() -> list[bytes]:
    """Every fixture, smallest first; most of the fuzzing takes the small ones."""
    unpack = zstandard.ZstdDecompressor()
    paths = (ROOT / "tests" / "audit" / "fixtures").glob("*.cubin.zst")
    return sorted((unpack.decompress(path.read_bytes()) for path in sorted(paths)), key=len)


def small(cubin: bytes, count: int) -> bytes:
    """The cubin with its first kernels alone: the other entry symbols become plain functions."""
    data = bytearray(cubin)
    (shoff,) = struct.unpack_from("<Q", data, 40)
    (number,) = struct.unpack_from("<H", data, 60)
    seen = 0
    for index in range(number):
        (kind,) = struct.unpack_from("<I", data, shoff + 64 * index + 4)
        if kind != 2:
            continue
        offset, size = struct.unpack_from("<QQ", data, shoff + 64 * index + 24)
        for at in range(offset, offset + size, 24):
            if data[at + 5] & 0x10:
                seen += 1
                if seen > count:
                    data[at + 5] &= ~0x10
    return bytes(data)


class Mutator:
    """Input number ``index`` of a seed."""

    def __init__(self, seeds: list[bytes]) -> None:
        self._seeds = seeds
        self._codes = [self._stretches(seed) for seed in seeds]

    def _stretches(self, data: bytes) -> list[tuple[int, int]]:
        """(offset, size) of header, tables and sections: what damage aims at."""
        (shoff,) = struct.unpack_from("<Q", data, 40)
        (number,) = struct.unpack_from("<H", data, 60)
        found = [(0, 64), (shoff, 64 * number)]
        for index in range(number):
            offset, size = struct.unpack_from("<QQ", data, shoff + 64 * index + 24)
            if size and offset + size <= len(data):
                found.append((offset, size))
        return found

    def make(self, seed: int, index: int) -> bytes:
        """The bytes, at most a few hundred KB."""
        rng = random.Random(f"{seed}/{index}")
        which = rng.randrange(len(self._seeds))
        data = bytearray(self._seeds[which])
        for _ in range(rng.choice((0, 1, 1, 2, 4, 16))):
            self._damage(data, rng, self._codes[which])
        if rng.random() < 0.1:
            del data[rng.randrange(len(data)) :]
        return self._wrap(bytes(data), rng)

    def _damage(self, data: bytearray, rng: random.Random, stretches: list[tuple[int, int]]) -> None:
        offset, size = rng.choice(stretches)
        at = offset + rng.randrange(size)
        how = rng.randrange(6)
        if how == 0:
            data[at] = rng.randrange(256)
        elif how == 1:
            data[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            width = rng.choice((2, 4, 8))
            at = min(at // width * width, len(data) - width)
            data[at : at + width] = (rng.choice(EDGES) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
        elif how == 3:
            # two instructions or records change places
            other = offset + rng.randrange(size) // 16 * 16
            at = offset + (at - offset) // 16 * 16
            data[at : at + 16], data[other : other + 16] = data[other : other + 16], data[at : at + 16]
        elif how == 4:
            # a branch, a wait or any other operation appears
            at = offset + (at - offset) // 16 * 16
            word = rng.choice((0x947, 0x949, 0x944, 0x94D, 0x91A, 0xB1D, 0x3BA, 0x3B5, 0x388, 0x985, 0x9C3, rng.randrange(4096)))
            data[at : at + 2] = (word | rng.choice((0x7000, 0, 0x8000))).to_bytes(2, "little")
        else:
            length = rng.randrange(1, 65)
            data[at : at + length] = rng.randbytes(min(length, len(data) - at))

    def _wrap(self, data: bytes, rng: random.Random) -> bytes:
        how = rng.randrange(10)
        if how < 5:
            return data
        if how == 5:
            packed = zstandard.ZstdCompressor(level=1).compress(data)
            wrapped = container(
                entry(packed, flags=0x108000, packed=len(packed), size=len(data) + rng.choice((0, 0, 0, 1, 1 << 20)))
            )
        elif how == 6:
            packed = lz4.block.compress(data, store_size=False)
            wrapped = container(
                entry(packed, flags=0x102000, packed=len(packed), size=len(data) + rng.choice((0, 0, 0, -1, 1 << 16)))
            )
        elif how == 7:
            wrapped = container(entry(data), entry(data, kind=rng.choice((1, 2, 4, 8))))
        elif how == 8:
            text = b"// x\n/* y */ .version 8.7\n.target sm_90a\n" + data[: rng.randrange(4096)]
            wrapped = container(entry(text, kind=1)) if rng.random() < 0.5 else text
        else:
            stream = io.BytesIO()
            with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as archive:
                archive.writestr("k.cubin", data)
            wrapped = stream.getvalue()
        damaged = bytearray(wrapped)
        for _ in range(rng.choice((0, 1, 2))):
            at = rng.randrange(min(len(damaged), rng.choice((32, 120, len(damaged)))))
            damaged[at] = rng.choice((rng.randrange(256), 0, 255))
        return bytes(damaged)


def feed(worker: Worker, data: bytes, folder: Path) -> Result:
    """As a file's bytes go through the audit; zips really go through a file."""
    result = Result()
    if data[:2] == b"PK":
        from blockscale.guard.audit.readers import plan

        path = folder / f"{os.getpid()}.zip"
        path.write_bytes(data)
        units = plan([path], LIMITS)
    else:
        assert len(data) <= SMALL
        found = list(scan(io.BytesIO(data), "fuzz", LIMITS))
        result.not_checked += [item for item in found if isinstance(item, NotChecked)]
        units = iter([Images(tuple(item for item in found if not isinstance(item, NotChecked)))])
    for unit in units:
        if isinstance(unit, NotChecked):
            result.not_checked.append(unit)
        else:
            result.add(worker.audit(unit))
    return result


def run(job: tuple[int, int, int, str]) -> dict[str, Any]:
    """Inputs first .. last - 1."""
    seed, first, last, folder = job
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + GIB,) * 2)
    fixtures = cubins()
    mutator = Mutator([small(data, 1) for data in fixtures] + [small(data, 3) for data in fixtures] + fixtures[:3])
    worker = Worker(Config(tuple(RULES), limits=LIMITS))
    found: dict[str, Any] = {"inputs": 0, "kernels": 0, "cubins": 0, "slowest": 0.0, "slowest_input": first, "failures": []}
    verdicts: Counter[str] = Counter()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for index in range(first, last):
        data = mutator.make(seed, index)
        started = time.process_time()
        try:
            result = feed(worker, data, Path(folder))
        except Exception:
            found["failures"].append({"input": index, "error": traceback.format_exc(limit=-4)})
            continue
        seconds = time.process_time() - started
        if seconds > found["slowest"]:
            found |= {"slowest": seconds, "slowest_input": index}
        if seconds > SLOW_SECONDS:
            found["failures"].append({"input": index, "error": f"{seconds:.2f} s"})
        found["inputs"] += 1
        found["kernels"] += result.kernels
        found["cubins"] += result.cubins
        verdicts.update(finding.rule for finding in result.findings)
        verdicts["refused"] += result.unreadable
    found["memory_mib"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
    return found | {"verdicts": dict(verdicts)}


def main() -> None:
    """Runs and writes the result; exit status 1 when something failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", type=int, help="how many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, help="run this input alone and print what is said of it")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=ROOT / "bench" / "results" / "audit_fuzz.json")
    options = parser.parse_args()
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        if options.only is not None:
            print(run((options.seed, options.only, options.only + 1, folder)))
            return
        step = 5000
        jobs = [(options.seed, first, min(first + step, options.inputs), folder) for first in range(0, options.inputs, step)]
        started = time.perf_counter()
        parts: list[dict[str, Any]] = []
        # a fresh process a job, so that the memory of each counts from its start
        with multiprocessing.get_context("fork").Pool(options.processes, maxtasksperchild=1) as pool:
            for part in pool.imap(run, jobs, chunksize=1):
                parts.append(part)
                for failure in part["failures"]:
                    print(failure["input"], failure["error"], file=sys.stderr, flush=True)
    slowest = max(parts, key=lambda part: part["slowest"])
    verdicts: Counter[str] = Counter()
    for part in parts:
        verdicts.update(part["verdicts"])
    result = {
        "inputs": sum(part["inputs"] for part in parts),
        "seed": options.seed,
        "failures": [failure for part in parts for failure in part["failures"]],
        "slowest_seconds": round(slowest["slowest"], 3),
        "slowest_input": slowest["slowest_input"],
        "most_memory_mib_beyond_start": max(part["memory_mib"] for part in parts),
        "cubins_parsed": sum(part["cubins"] for part in parts),
        "kernels_judged": sum(part["kernels"] for part in parts),
        "verdicts": dict(verdicts),
        "seconds": round(time.perf_counter() - started),
        "rules": list(RULES),
    }
    write_json(options.out, result)
    print(result)
    sys.exit(bool(result["failures"]))


if __name__ == "__main__":
    main()
