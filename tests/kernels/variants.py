"""Compile variants of every kernel ahead of time, without a GPU, and say what is in the compiled code.

A script of its own because the installed Triton or another one is to be used: ``python variants.py COUNT ARCH...`` prints a
JSON line a variant and architecture. COUNT: variants of each kernel, chosen so that every pair of option values occurs
early; 0: all pairs and no fewer.
"""

import itertools
import json
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from blockscale.kernels.quantize_mxfp8 import quantize_mxfp8
from blockscale.kernels.quantize_nvfp4 import quantize_nvfp4
from blockscale.kernels.scale_nvfp4 import group_amax, multipliers
from blockscale.ops.launch import quantize as launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BOOL = (False, True)
PLANES = ((True, False), (False, True), (True, True))
LAYOUTS = ("swizzled", "compact", "linear", "swizzled_8x4")
WHERE = ((False, 1), (True, 1), (True, 4), (True, 0))
DTYPES = ("bf16", "fp16", "fp32")


def mxfp8(dtype, where, planes, square, e5m2, floor, ignore, layout):
    flags = {"GROUPED": where[0], "CHUNKS": where[1], "ROW": planes[0], "COL": planes[1], "SQUARE": square, "E5M2": e5m2}
    flags |= {"FLOOR": floor, "IGNORE_NAN": ignore, "LAYOUT": layout if not where[0] else LAYOUTS[LAYOUTS.index(layout) % 2]}
    return flags, launch.mxfp8_candidates(*planes)


def nvfp4(dtype, where, planes, kind, stochastic, ignore, layout):
    flags = {"GROUPED": where[0], "CHUNKS": where[1], "ROW": planes[0], "COL": planes[1]}
    flags |= {"SQUARE": kind == "square", "HADAMARD": kind == "hadamard", "STOCHASTIC": stochastic, "IGNORE_NAN": ignore}
    flags["LAYOUT"] = layout if not where[0] else LAYOUTS[LAYOUTS.index(layout) % 2]
    return flags, launch.nvfp4_candidates()


def amax(dtype, where, planes, hadamard):
    flags = {"GROUPED": where[0], "CHUNKS": where[1], "ROW": planes[0], "COL": planes[1], "HADAMARD": hadamard}
    return flags, launch.amax_candidates()


POINTERS = {"offsets": "i64", "status": "i64", "rng": "i64", "multiplier": "fp32", "amax": "i32"}
KERNELS = {
    "quantize_mxfp8": (quantize_mxfp8, mxfp8, (DTYPES, WHERE, PLANES, BOOL, BOOL, BOOL, BOOL, LAYOUTS)),
    "quantize_nvfp4": (quantize_nvfp4, nvfp4, (DTYPES, WHERE, PLANES, ("plain", "square", "hadamard"), BOOL, BOOL, LAYOUTS)),
    "group_amax": (group_amax, amax, (DTYPES, WHERE, PLANES, BOOL)),
}


def pairwise(values, seed=0):
    """Rows of choices, each covering as many unseen pairs as the best of 200 random ones, until every pair occurs."""
    draw = random.Random(seed)
    columns = range(len(values))
    left = {(a, i, b, j) for a, b in itertools.combinations(columns, 2) for i in values[a] for j in values[b]}

    def covered(row):
        return {(a, row[a], b, row[b]) for a, b in itertools.combinations(columns, 2)} & left

    while left:
        a, i, b, j = min(left, key=repr)
        rows = [[draw.choice(v) for v in values] for _ in range(200)]
        for row in rows:
            row[a], row[b] = i, j
        row = max(rows, key=lambda row: len(covered(row)))
        left -= covered(row)
        yield tuple(row)


def compiled(kernel, flags, candidate, arch, dtype):
    data = "i32" if kernel is quantize_nvfp4 else "u8"
    pointers = {name: POINTERS.get(name, data if name.endswith("_data") else "u8") for name in kernel.arg_names}
    pointers["x"] = dtype
    constants = {**flags, **candidate.constants}
    scalars = ("stride", "groups", "rows", "columns", "num_tiles")
    signature = {n: "constexpr" if n in constants else "i32" if n in scalars else f"*{pointers[n]}" for n in kernel.arg_names}
    aligned = [i for i, n in enumerate(kernel.arg_names) if n in ("stride", "columns") or signature[n].startswith("*")]
    options = {k: v for k, v in candidate.all_options().items() if k not in constants}
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def inspect(result):
    """Registers, stack bytes, and how many of each kind of instruction."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(result.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        text = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)((?:\.[A-Z0-9_]+)*)", text, re.M)
    kinds = Counter(name for name, _ in found)
    wide = Counter(name for name, tail in found if name in ("LDG", "STG") and ("128" in tail or "64" in tail))
    return {
        "registers": int(re.search(r"REG:(\d+)", usage)[1]),
        "stack": int(re.search(r"STACK:(\d+)", usage)[1]),
        "local": kinds["LDL"] + kinds["STL"],
        "generic": sum(kinds[name] for name in ("LD", "ST", "ATOM")),
        "syscalls": len(re.findall(r"__cuda_syscall|cudaMalloc|vprintf", text)),
        "wide": dict(wide),
        "instructions": len(found),
    }


def report(name, row, arch):
    """The first candidate that does not spill, as the launch picks it."""
    kernel, describe, _ = KERNELS[name]
    flags, candidates = describe(*row)
    for candidate in candidates:
        facts = inspect(compiled(kernel, flags, candidate, arch, row[0]))
        if facts["stack"] == 0 and facts["local"] == 0:
            break
    return {"kernel": name, "arch": arch, "flags": flags, "dtype": row[0], "candidate": candidates.index(candidate), **facts}


def main():
    count, archs = int(sys.argv[1]), [int(a) for a in sys.argv[2:]]
    for name, (_, _, values) in KERNELS.items():
        rows = list(pairwise(values))
        for row in rows[: count or None]:
            for arch in archs:
                print(json.dumps(report(name, row, arch)), flush=True)
    for arch in archs:
        options = launch.MULTIPLIERS_CANDIDATE.all_options()
        types = {"amax": "*fp32", "table": "*fp32", "row_amax": "*fp32", "col_amax": "*fp32", "groups": "i32"}
        signature = {n: types.get(n, "constexpr") for n in multipliers.arg_names}
        source = ASTSource(multipliers, signature, {"ROW": True, "COL": True})
        result = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        print(json.dumps({"kernel": "multipliers", "arch": arch, "flags": {}, "candidate": 0, **inspect(result)}), flush=True)
    print(json.dumps({"triton": triton.__version__}))


if __name__ == "__main__":
    main()
