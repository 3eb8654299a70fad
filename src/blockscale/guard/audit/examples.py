"""The instructions around a finding, with a remark on each that orders shared memory; what the HTML report shows.

A worker cuts them out while it has the kernel; the text of the instructions comes from the vendor's disassembler when there is
one, else the encodings are shown.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from blockscale.guard.audit.cubin import WORD
from blockscale.guard.audit.rules.base import Hit, KernelView
from blockscale.guard.audit.sass import events as ev
from blockscale.guard.audit.sass import fields

#: instructions before and behind the finding that may be shown
BEFORE, BEHIND = 160, 24
#: always shown around the finding; other lines only if they have a remark
NEAR = 5
_SECONDS = 20
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;")
_REMARKS = {
    ev.BULK_STORE: "bulk store: reads shared memory later",
    ev.SHARED_WRITE: "writes shared memory",
    ev.BARRIER: "barrier of the block",
    ev.ARRIVE: "arrives at an mbarrier",
    ev.EXIT: "exit",
    ev.CALL: "call",
    ev.INDIRECT: "jump through a register",
}


@dataclass(frozen=True)
class Example:
    """A stretch of a kernel.

    Attributes:
        first: program counter of ``code``'s first instruction.
        at: program counter of the finding.
        remarks: program counter -> what it does.
    """

    rule: str
    arch: str
    kernel: str
    first: int
    at: int
    code: bytes
    remarks: dict[int, str]


def cut(view: KernelView, rule: str, hit: Hit) -> Example | None:
    """The stretch around a finding; None for a finding about the kernel as a whole."""
    code = view.kernel.code
    at = None if hit.offset is None else hit.offset // WORD
    if at is None or not 0 <= at < len(code) // 2:
        return None
    first, last = max(0, at - BEFORE), min(len(code) // 2, at + BEHIND)
    graph = ev.extract(code)
    remarks: dict[int, str] = {}
    for index, kind, depth in zip(graph.at.tolist(), graph.kind.tolist(), graph.depth.tolist(), strict=True):
        if first <= index < last and (kind in _REMARKS or kind == ev.WAIT):
            remarks[index * WORD] = _REMARKS.get(kind) or f"this thread waits until at most {depth} of its groups are pending"
    remarks |= {pc: text for pc, text in hit.marks if first * WORD <= pc < last * WORD}
    return Example(rule, view.arch, view.kernel.name, first * WORD, at * WORD, code[2 * first : 2 * last].tobytes(), remarks)


def disassembler() -> Path | None:
    """``nvdisasm`` on the path, in CUDA_HOME, or in Triton's package; None when there is none."""
    found = shutil.which("nvdisasm")
    candidates = [Path(found)] if found else []
    if home := os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH"):
        candidates.append(Path(home) / "bin" / "nvdisasm")
    triton = find_spec("triton")
    if triton is not None and triton.origin:
        candidates.append(Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm")
    return next((path for path in candidates if path.is_file()), None)


def texts(examples: list[Example], tool: Path | None) -> list[dict[int, str]]:
    """Of each example: program counter -> instruction; the encoding where no disassembler can say more."""
    if tool is None:
        return [_encodings(example) for example in examples]
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
        return list(pool.map(lambda example: _encodings(example) | _disassemble(example, tool), examples))


def shown(example: Example) -> Iterable[int | None]:
    """Program counters worth showing, in order; None where some are left out."""
    previous = example.first - WORD
    for pc in range(example.first, example.first + len(example.code), WORD):
        if pc in example.remarks or abs(pc - example.at) <= NEAR * WORD:
            if pc != previous + WORD:
                yield None
            previous = pc
            yield pc


def _encodings(example: Example) -> dict[int, str]:
    words = fields.words_of(example.code)
    return {example.first + WORD * i: f"{int(words[2 * i + 1]):016x} {int(words[2 * i]):016x}" for i in range(len(words) // 2)}


def _disassemble(example: Example, tool: Path) -> dict[int, str]:
    with tempfile.NamedTemporaryFile(suffix=".bin") as file:
        file.write(example.code)
        file.flush()
        command = [str(tool), "-b", example.arch.upper().replace("_", "").rstrip("AF"), "-base", hex(example.first), file.name]
        if example.arch[-1] in "af":
            command[2] += example.arch[-1]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=_SECONDS)
        except (OSError, subprocess.SubprocessError):
            return {}
    return {int(match.group(1), 16): match.group(2) for match in _LINE.finditer(done.stdout)}
