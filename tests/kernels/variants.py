"""Compile variants of every kernel ahead of time, without a GPU, and say what is in the compiled code.

A script of its own because the installed Triton or another one is to be used: ``python variants.py FIRST COUNT ARCH...`` prints
a JSON line a variant and architecture. Variants of a kernel stand in an order in which every pair of option values occurs
early; FIRST, COUNT: which of them; COUNT 0: all, every pair.
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

from blockscale.formats import MXFP4, MXFP8, NVFP4, FP8Block, FP8Tensor
from blockscale.guard.audit import Config, audit
from blockscale.kernels.dequantize import dequantize_columns, dequantize_rows
from blockscale.kernels.quantize_fp8_block import quantize_fp8_block, quantize_fp8_rows
from blockscale.kernels.quantize_fp8_tensor import amax_of_groups, quantize_fp8_tensor
from blockscale.kernels.quantize_mxfp4 import quantize_mxfp4
from blockscale.kernels.quantize_mxfp8 import quantize_mxfp8
from blockscale.kernels.quantize_nvfp4 import quantize_nvfp4
from blockscale.kernels.scale_nvfp4 import group_amax, multipliers
from blockscale.ops.launch import dequantize as launch_values
from blockscale.ops.launch import quantize as launch
from blockscale.ops.launch import tiles

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
BOOL = (False, True)
PLANES = ((True, False), (False, True), (True, True))
LAYOUTS = ("swizzled", "compact", "linear", "swizzled_8x4")
WHERE = ((False, 1), (True, 1), (True, 4), (True, 0))
DTYPES = ("bf16", "fp16", "fp32")


def common(where, planes):
    return {"GROUPED": where[0], "CHUNKS": where[1], "ROW": planes[0], "COL": planes[1]}


def possible(layout, grouped):
    """The layout, or another that a grouped tensor has."""
    return LAYOUTS[LAYOUTS.index(layout) % 2] if grouped else layout


def mxfp8(dtype, where, planes, square, e5m2, floor, ignore, layout):
    flags = common(where, planes) | {"SQUARE": square, "E5M2": e5m2, "FLOOR": floor, "IGNORE_NAN": ignore}
    return flags | {"LAYOUT": possible(layout, where[0])}, launch.mxfp8_candidates(*planes), {}


def nvfp4(dtype, where, planes, kind, stochastic, ignore, layout):
    flags = common(where, planes) | {"SQUARE": kind == "square", "HADAMARD": kind == "hadamard", "STOCHASTIC": stochastic}
    flags |= {"IGNORE_NAN": ignore, "LAYOUT": possible(layout, where[0])}
    return flags, launch.nvfp4_candidates(), CODES_IN_WORDS


def mxfp4(dtype, where, planes, square, floor, ignore, layout):
    flags = common(where, planes) | {"SQUARE": square, "FLOOR": floor, "IGNORE_NAN": ignore}
    return flags | {"LAYOUT": possible(layout, where[0])}, tiles.FOUR, CODES_IN_WORDS


def amax(dtype, where, planes, hadamard):
    return common(where, planes) | {"HADAMARD": hadamard}, launch.amax_candidates(), {"amax": "i32"}


def fp8_block(dtype, where, planes, square, e5m2, power_of_two, words):
    flags = common(where, planes) | {"SQUARE": square, "E5M2": e5m2, "POWER_OF_TWO": power_of_two}
    return flags | {"WORDS": words or where[0]}, tiles.BLOCK, FLOAT_SCALES | ({"col_data": "i32"} if words or where[0] else {})


def fp8_rows(dtype, where, e5m2, power_of_two):
    return {"GROUPED": where[0], "E5M2": e5m2, "POWER_OF_TWO": power_of_two}, tiles.ROWS, FLOAT_SCALES


def fp8_tensor(dtype, where, planes, delayed, e5m2, power_of_two, words):
    flags = common(where, planes) | {"DELAYED": delayed, "E5M2": e5m2, "POWER_OF_TWO": power_of_two and not delayed}
    types = FLOAT_SCALES | ({"col_data": "i32"} if words or where[0] else {})
    types |= dict.fromkeys(("row_amax", "col_amax"), "i32" if delayed else "fp32")
    return flags | {"WORDS": words or where[0]}, tiles.TENSOR, types


def fp8_amax(dtype, where):
    return {"GROUPED": where[0], "CHUNKS": where[1]}, tiles.AMAX, {"amax": "i32"}


def values(dtype, where, fmt, column, layout):
    """Of the kernel that reads the plane by row, or transposed."""
    flags = launch_values.constants(fmt, column, possible(layout, where[0]))
    transposed = column and fmt.transposed
    if transposed:
        del flags["COLUMN"]
    flags |= {"GROUPED": where[0], "CHUNKS": where[1]}
    types = {"amax": "fp32", "scale": "u8" if fmt.has_codes else "fp32"}
    return flags, launch_values.COLUMNS if transposed else launch_values.ROWS, types


def columns(dtype, where, fmt, layout):
    return values(dtype, where, fmt, True, layout)


SCALARS = ("stride", "groups", "rows", "columns", "num_tiles", "given_pitch")
POINTERS = {"offsets": "i64", "status": "i64", "rng": "i64", "multiplier": "fp32", "given": "fp32"}
CODES_IN_WORDS = {"row_data": "i32", "col_data": "i32"}
FLOAT_SCALES = {"row_scale": "fp32", "col_scale": "fp32"}
FORMATS = (
    MXFP8(),
    MXFP8("e5m2"),
    MXFP4(),
    NVFP4(),
    NVFP4(row_scaled=True),
    FP8Tensor(),
    FP8Block("e5m2"),
    FP8Block(block=(128, 128)),
)
KERNELS = {
    "quantize_mxfp8": (quantize_mxfp8, mxfp8, (DTYPES, WHERE, PLANES, BOOL, BOOL, BOOL, BOOL, LAYOUTS)),
    "quantize_nvfp4": (quantize_nvfp4, nvfp4, (DTYPES, WHERE, PLANES, ("plain", "square", "hadamard"), BOOL, BOOL, LAYOUTS)),
    "group_amax": (group_amax, amax, (DTYPES, WHERE, PLANES, BOOL)),
    "quantize_mxfp4": (quantize_mxfp4, mxfp4, (DTYPES, WHERE, PLANES, BOOL, BOOL, BOOL, LAYOUTS)),
    "quantize_fp8_block": (quantize_fp8_block, fp8_block, (DTYPES, WHERE, PLANES, BOOL, BOOL, BOOL, BOOL)),
    "quantize_fp8_rows": (quantize_fp8_rows, fp8_rows, (DTYPES, WHERE[:2], BOOL, BOOL)),
    "quantize_fp8_tensor": (quantize_fp8_tensor, fp8_tensor, (DTYPES, WHERE, PLANES, BOOL, BOOL, BOOL, BOOL)),
    "amax_of_groups": (amax_of_groups, fp8_amax, (DTYPES, WHERE)),
    "dequantize_rows": (dequantize_rows, values, (DTYPES, WHERE, FORMATS, (False,), LAYOUTS)),
    "dequantize_mxfp8_columns": (dequantize_rows, values, (DTYPES, WHERE, FORMATS[:2], (True,), LAYOUTS)),
    "dequantize_columns": (dequantize_columns, columns, (DTYPES, WHERE, FORMATS[2:], LAYOUTS)),
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


def compiled(kernel, flags, candidate, arch, dtype, types):
    constants = {**flags, **candidate.constants}

    def type_of(name):
        if name in constants:
            return "constexpr"
        if name in SCALARS or name in ("eps", "top"):
            return "i32" if name in SCALARS else "fp32"
        return "*" + (dtype if name in ("x", "out") else types.get(name) or POINTERS.get(name, "u8"))

    signature = {name: type_of(name) for name in kernel.arg_names}
    whole = ("stride", "rows", "columns")
    aligned = [i for i, n in enumerate(kernel.arg_names) if n in whole or signature[n].startswith("*")]
    options = {k: v for k, v in candidate.all_options().items() if k not in constants}
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in aligned})
    return triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)


def inspect(result):
    """Registers, stack bytes, how many of each kind of instruction, and what `blockscale audit` says of all severities."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(result.asm["cubin"])
        usage = subprocess.run([TOOLS / "cuobjdump", "-res-usage", path], capture_output=True, text=True, check=True).stdout
        text = subprocess.run([TOOLS / "nvdisasm", "-c", path], capture_output=True, text=True, check=True).stdout
        audited = audit([str(path)], Config(processes=1))
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
        "audited": audited.kernels,
        "findings": [f"{finding.rule}: {finding.detail}" for finding in audited.findings],
        "not_checked": [item.why for item in audited.not_checked],
    }


def report(name, row, arch):
    """The first candidate that does not spill, as the launch picks it."""
    kernel, describe, _ = KERNELS[name]
    flags, candidates, types = describe(*row)
    for candidate in candidates:
        facts = inspect(compiled(kernel, flags, candidate, arch, row[0], types))
        if facts["stack"] == 0 and facts["local"] == 0:
            break
    return {"kernel": name, "arch": arch, "flags": flags, "dtype": row[0], "candidate": candidates.index(candidate), **facts}


def main():
    first, count, archs = int(sys.argv[1]), int(sys.argv[2]), [int(a) for a in sys.argv[3:]]
    for name, (_, _, options) in KERNELS.items():
        rows = list(pairwise(options))
        for row in rows[first : first + count] if count else rows:
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
