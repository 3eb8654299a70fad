"""Our reading of instructions against the vendor's disassembler: events, jumps and destinations, instruction by instruction."""

import itertools
import os
import re
import subprocess
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from audit.ptx_sources import SOURCES, TARGETS, compile_ptx, ptxas
from audit.support_audit import cubin
from blockscale.guard.audit.cubin import Cubin
from blockscale.guard.audit.elf import Elf
from blockscale.guard.audit.limits import Limits
from blockscale.guard.audit.readers import NotChecked, decompress, plan, read, resolve
from blockscale.guard.audit.sass import events as ev
from blockscale.guard.audit.sass.slicing import Slicer

pytestmark = pytest.mark.skipif(ptxas() is None, reason="needs the nvdisasm of Triton's wheel")
_LINE = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z0-9_.]+)\s*(.*?)\s*;")
_KINDS = {
    "UTMASTG": ev.BULK_STORE,
    "UTMAREDG": ev.BULK_STORE,
    "UBLKRED": ev.BULK_STORE,
    "STS": ev.SHARED_WRITE,
    "STSM": ev.SHARED_WRITE,
    "LDGSTS": ev.SHARED_WRITE,
    "BRA": ev.BRANCH,
    "EXIT": ev.EXIT,
    "RET": ev.EXIT,
    "BRX": ev.INDIRECT,
    "BRXU": ev.INDIRECT,
}


def disassemble(code: bytes, arch: str, folder: Path) -> list[tuple[str, str, str]]:
    """(guard, mnemonic, operands) of each instruction."""
    path, tool = folder / "code.bin", ptxas().parent / "nvdisasm"
    path.write_bytes(code)
    done = subprocess.run([str(tool), "-b", arch.replace("sm_", "SM"), str(path)], capture_output=True, text=True, check=True)
    return [((m.group(2) or "").strip(), m.group(3), m.group(4)) for m in map(_LINE.search, done.stdout.splitlines()) if m]


def expected_kind(mnemonic: str, operands: str) -> int | None:
    """The event that the text says; None where the text does not say all."""
    name = mnemonic.split(".")[0]
    if name == "BAR":
        return ev.NONE if ".ARV" in mnemonic else ev.BARRIER
    if name == "DEPBAR":
        return ev.WAIT if re.fullmatch(r"SB0, 0x[0-9a-f]+", operands) else ev.NONE
    if name == "UBLKCP":
        return ev.BULK_STORE if ".G.S" in mnemonic or mnemonic == "UBLKCP.T.S" else ev.NONE
    return _KINDS.get(name)


def differences(code: np.ndarray, arch: str, folder: Path) -> tuple[int, Counter[str]]:
    """How many instructions were compared, and where the two readings differ."""
    text = disassemble(code.tobytes(), arch, folder)
    assert len(text) == len(code) // 2
    graph, found = ev.extract(code), Counter()
    kinds, maybe = (
        dict(zip(graph.at.tolist(), graph.kind.tolist(), strict=True)),
        dict(zip(graph.at.tolist(), graph.maybe.tolist(), strict=True)),
    )
    targets = dict(zip(graph.at.tolist(), graph.target.tolist(), strict=True))
    first, count, uniform = Slicer(code)._results
    for at, (guard, mnemonic, operands) in enumerate(text):
        wanted = expected_kind(mnemonic, operands)
        if wanted is not None and kinds.get(at, ev.NONE) != wanted and guard not in ("@!PT", "@!UPT"):
            found[f"kind of {mnemonic} {operands}"] += 1
        if mnemonic.startswith("BRA") and re.search(r"0x[0-9a-f]+$", operands):
            target = int(operands.split()[-1].split(",")[-1], 16) // 16
            if targets[at] != np.searchsorted(graph.at, target):
                found[f"target of {mnemonic} {operands}"] += 1
            conditional = bool(guard) or not re.fullmatch(r"0x[0-9a-f]+", operands)
            if maybe[at] != conditional:
                found[f"condition of {guard} {mnemonic} {operands}"] += 1
        named = [re.sub(r"\.(reuse|64)\b", "", name.strip()) for name in operands.split(",")[:3]]
        if count[at] and f"{'U' if uniform[at] else ''}R{first[at]}" not in named and first[at] != 63:
            found[f"no such result in {mnemonic} {operands}: {'U' if uniform[at] else ''}R{first[at]}"] += 1
        operand = operands.split(",")[0].strip()
        result = re.fullmatch(r"(U?)R(\d+)(\.64)?", operand)
        if count[at] and result and (bool(result.group(1)), int(result.group(2))) != (uniform[at], first[at]):
            found[f"result of {mnemonic} {operands}: {'U' if uniform[at] else ''}R{first[at]}"] += 1
        wide = re.search(r"\.(64|128|WIDE)\b", mnemonic) and re.match(
            r"(U?MOV|U?IADD|IMAD|UIMAD|U?LDC|LDCU|LDG|LDS|LD|LDL)\.", mnemonic
        )
        if (
            count[at]
            and result
            and (count[at] > 1) != bool(wide)
            and mnemonic.split(".")[0] in {"MOV", "IMAD", "LDG", "LDS", "LDC", "LDCU", "UMOV"}
        ):
            found[f"width of {mnemonic} {operands}"] += 1
    return len(text), found


@pytest.mark.parametrize("arch", [*TARGETS, "sm_103a", "sm_110a", "sm_121a"])
def test_our_own_kernels(arch, tmp_path):
    codes = []
    for (rule, source), bad in itertools.product(SOURCES.items(), (False, True)):
        data = cubin(rule, "bad" if bad else "good", arch) if arch in TARGETS else compile_ptx(source(bad), arch)
        codes += [kernel.code for kernel in Cubin(Elf.parse(data)).kernels()]
    total, found = differences(np.concatenate(codes), arch, tmp_path)
    assert found == {}
    assert total > 5_000


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90", "sm_100a", "sm_103a", "sm_120f"])
def test_shipped_kernels(arch, tmp_path):
    """At least 10^5 instructions of each target, from the largest library at hand."""
    folder = os.environ.get("BLOCKSCALE_WHEELS", "")
    wheels = sorted(Path(folder).glob("transformer_engine_cu13-2.20.2-*.whl")) if folder else []
    if not wheels:
        pytest.skip("BLOCKSCALE_WHEELS names no folder with transformer-engine-cu13 2.20.2")
    codes, limits = [], Limits()
    for unit in plan(resolve(str(wheels[0])), limits):
        for image in () if isinstance(unit, NotChecked) else read(unit, limits):
            wanted = not isinstance(image, NotChecked) and image.arch == arch and sum(map(len, codes)) < 300_000
            if wanted:
                kernels = Cubin(Elf.parse(decompress(image, limits)), image.arch).kernels()
                codes += [kernel.code for kernel in kernels[:: max(1, len(kernels) // 4)]]
    total, found = differences(np.concatenate(codes), arch, tmp_path)
    assert found == {}
    assert total > 100_000
