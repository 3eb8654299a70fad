"""PTX of the audit's fixtures, written for the purpose: small kernels with and without each fault, in many forms.

``python tests/audit/ptx_sources.py`` compiles them with the ptxas of Triton's wheel into tests/audit/fixtures (zstd-compressed
cubins, one for each rule, verdict and target). Kernels are named ``bad_*`` or ``good_*``.
"""

from __future__ import annotations

import itertools
import subprocess
import tempfile
from pathlib import Path

TARGETS = ("sm_90a", "sm_100a", "sm_120a")
FIXTURES = Path(__file__).parent / "fixtures"

_HEADER = ".version {version}\n.target {target}\n.address_size 64\n"
_FRAME = """
.visible .entry {name}(.param .u64 out, .param .align 64 .b8 map[128], .param .u32 rounds)
{{
    .reg .pred %p<8>; .reg .b32 %r<40>; .reg .b64 %rd<16>; .reg .f32 %f<8>;
    .shared .align 1024 .b8 buffer[16384];
    .shared .align 8 .b64 bar;
    mov.u32 %r1, %tid.x;
    mov.u32 %r2, buffer;
    shl.b32 %r3, %r1, 4;
    add.s32 %r4, %r2, %r3;
    mov.b64 %rd1, map;
    ld.param.u64 %rd2, [out];
    cvta.to.global.u64 %rd3, %rd2;
    ld.param.u32 %r5, [rounds];
    setp.ne.s32 %p1, %r1, 0;
    mov.u32 %r6, 0;
    mov.u32 %r10, bar;
{body}
    ret;
}}
"""

WRITES = {
    "word": "st.shared.b32 [%r4+{at}], %r6;",
    "vector": "st.shared.v4.b32 [%r4+{at}], {{%r6, %r1, %r6, %r1}};",
    "byte": "cvt.u16.u32 %rs, %r6; st.shared.b8 [%r4+{at}], %rs;",
    "matrix": "stmatrix.sync.aligned.m8n8.x4.shared.b16 [%r4+{at}], {{%r6, %r1, %r6, %r1}};",
    "copy": "cp.async.cg.shared.global [%r4+{at}], [%rd3], 16; cp.async.wait_all;",
}
STORES = {
    "tensor": "cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%rd1, {{%r6, %r6}}], [%r2+{at}];",
    "tensor3": "cp.async.bulk.tensor.3d.global.shared::cta.bulk_group [%rd1, {{%r6, %r6, %r6}}], [%r2+{at}];",
    "bulk": "add.s32 %r9, %r2, {at}; cp.async.bulk.global.shared::cta.bulk_group [%rd3], [%r9], 2048;",
    "reduce": "cp.reduce.async.bulk.tensor.2d.global.shared::cta.add.bulk_group [%rd1, {{%r6, %r6}}], [%r2+{at}];",
    "bulk_reduce": "add.s32 %r9, %r2, {at}; cp.reduce.async.bulk.global.shared::cta.bulk_group.add.u32 [%rd3], [%r9], 2048;",
}
FENCE, BARRIER, NAMED, COMMIT = "fence.proxy.async.shared::cta;", "bar.sync 0;", "bar.sync 3, 128;", "cp.async.bulk.commit_group;"


def wait(depth: int, read: bool = True) -> str:
    """The issuer's wait for all but ``depth`` groups."""
    return f"cp.async.bulk.wait_group{'.read' if read else ''} {depth};"


def kernel(name: str, *lines: str) -> str:
    """An entry with the common frame around the lines."""
    body = "\n".join("    " + line for line in ("  .reg .b16 %rs;", *lines))
    return _FRAME.format(name=name, body=body)


def _round(write: str, store: str, at: int, label: str, after: list[str], depth: int, read: bool) -> list[str]:
    return [
        WRITES[write].format(at=at),
        FENCE,
        BARRIER,
        f"@%p1 bra {label};",
        STORES[store].format(at=at),
        COMMIT,
        wait(depth, read),
        f"{label}:",
        *after,
        "add.s32 %r6, %r6, 1;",
    ]


def _ring(name: str, write: str, store: str, after: list[str], *, loop: bool, depth: int, read: bool) -> str:
    """Two buffers, written by all, stored by thread 0: in a loop, or unrolled three times."""
    offsets = (0, 8192) if depth else (0, 0)
    if not loop:
        lines = [line for i in range(3) for line in _round(write, store, offsets[i % 2], f"S{i}", after, depth, read)]
    else:
        lines = ["L:"]
        lines += [line for i in range(2) for line in _round(write, store, offsets[i], f"S{i}", after, depth, read)]
        lines += ["setp.lt.u32 %p2, %r6, %r5;", "@%p2 bra L;"]
    return kernel(name, *lines, wait(0))


def handoff(bad: bool) -> str:
    """tma-handoff: every write with every store; the good ones have a barrier behind the wait, the bad ones none."""
    found = []
    for number, (write, store) in enumerate(itertools.product(WRITES, STORES)):
        form = {"loop": number % 2 == 0, "depth": number % 3 % 2, "read": number % 4 < 2}
        after = [] if bad else [NAMED if number % 3 == 2 else BARRIER]
        found.append(_ring(f"{'bad' if bad else 'good'}_{write}_{store}", write, store, after, **form))
    if not bad:
        found += _good_handoffs()
    return "".join(found)


def _good_handoffs() -> list[str]:
    once = [WRITES["word"].format(at=0), FENCE, BARRIER, "@%p1 bra E;", STORES["tensor"].format(at=0), COMMIT, wait(0), "E:"]
    own = [WRITES["word"].format(at=0), FENCE, "bar.warp.sync 0xffffffff;", "@%p1 bra S;", STORES["bulk"].format(at=0)]
    own += [COMMIT, wait(0), "S:", "bar.warp.sync 0xffffffff;"]
    return [
        kernel("good_once", *once),
        kernel("good_barrier_before_wait_is_followed_by_one", *once, BARRIER, WRITES["vector"].format(at=0)),
        kernel("good_warp_private", BARRIER, "L:", *own, "add.s32 %r6, %r6, 1;", "setp.lt.u32 %p2, %r6, %r5;", "@%p2 bra L;"),
    ]


def drained(bad: bool) -> str:
    """never-drained: the last wait leaves groups pending, or there is none; good ones wait for all."""
    endings = ([], [wait(1)], [wait(2, False)]) if bad else ([wait(0)], [wait(0, False)], [wait(1), wait(0)])
    found = []
    for number, (write, store) in enumerate(itertools.product(("word", "vector", "matrix"), STORES)):
        lines = [WRITES[write].format(at=0), FENCE, BARRIER, "@%p1 bra E;", STORES[store].format(at=0), COMMIT]
        name = f"{'bad' if bad else 'good'}_{write}_{store}"
        found.append(kernel(name, *lines, *endings[number % 3], "E:"))
    return "".join(found)


_LOADS = {
    "1d": "tensor.1d.{space}.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6}}], [%r10];",
    "2d": "tensor.2d.{space}.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6, %r6}}], [%r10];",
    "3d": "tensor.3d.{space}.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6, %r6, %r6}}], [%r10];",
    "4d": "tensor.4d.{space}.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6, %r6, %r6, %r6}}], [%r10];",
    "5d": "tensor.5d.{space}.global.tile.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6, %r6, %r6, %r6, %r6}}], [%r10];",
    "im2col3": "tensor.3d.{space}.global.im2col.mbarrier::complete_tx::bytes [%r2], [%rd1, {{%r6, %r6, %r6}}], [%r10], {{%rs}};",
    "im2col4": "tensor.4d.{space}.global.im2col.mbarrier::complete_tx::bytes"
    " [%r2], [%rd1, {{%r6, %r6, %r6, %r6}}], [%r10], {{%rs, %rs}};",
    "im2col5": "tensor.5d.{space}.global.im2col.mbarrier::complete_tx::bytes"
    " [%r2], [%rd1, {{%r6, %r6, %r6, %r6, %r6}}], [%r10], {{%rs, %rs, %rs}};",
    "bulk": "{space}.global.mbarrier::complete_tx::bytes [%r2], [%rd3], 2048, [%r10];",
}


def loads(bad: bool) -> str:
    """syscall: bulk loads into shared::cluster (bad on sm_120) or shared::cta (good everywhere), once or in a loop."""
    space = "shared::cluster" if bad else "shared::cta"
    found = []
    for (form, text), loop in itertools.product(_LOADS.items(), (False, True)):
        load = "cp.async.bulk." + text.format(space=space)
        lines = ["mov.u16 %rs, 0;", "mbarrier.init.shared.b64 [%r10], 1;", BARRIER, "L:", "@%p1 bra E;", load, "E:"]
        if loop:
            lines += ["add.s32 %r6, %r6, 1;", "setp.lt.u32 %p2, %r6, %r5;", "@%p2 bra L;"]
        found.append(kernel(f"{'bad' if bad else 'good'}_{form}_{'loop' if loop else 'once'}", *lines))
    return "".join(found)


def stacks(bad: bool) -> str:
    """stack: local arrays indexed by a parameter, beyond the default 1,024 bytes a thread or within."""
    found = []
    for number in range(12):
        size = 1040 + 512 * number if bad else 64 * (number + 1)
        name = f"{'bad' if bad else 'good'}_local_{size}"
        lines = [
            f".local .align 16 .b8 space[{size}];",
            "mov.u64 %rd4, space;",
            "and.b32 %r7, %r5, 15;",
            "mul.wide.u32 %rd5, %r7, 4;",
        ]
        lines += ["add.s64 %rd6, %rd4, %rd5;", "st.local.b32 [%rd6], %r1;", f"ld.local.b32 %r8, [%rd4+{size - 4}];"]
        found.append(kernel(name, *lines, "st.global.b32 [%rd3], %r8;"))
    return "".join(found)


_ACCESSES = {
    "store": "st.b32 [%rd8+4], %r1;",
    "store2": "st.v2.b32 [%rd8+8], {%r1, %r6};",
    "store4": "st.v4.b32 [%rd8+16], {%r1, %r6, %r1, %r6};",
    "load": "ld.b32 %r8, [%rd8+4]; st.global.b32 [%rd3], %r8;",
    "load4": "ld.v4.b32 {%r8, %r11, %r12, %r13}, [%rd8+16]; st.global.v4.b32 [%rd3], {%r8, %r11, %r12, %r13};",
    "atomic": "atom.add.u32 %r8, [%rd8], %r1; st.global.b32 [%rd3], %r8;",
}


def generics(bad: bool) -> str:
    """generic-on-shared: a shared pointer or a parameter, chosen at run time; good ones are global or of another block."""
    shared = ["cvt.u64.u32 %rd4, %r2;", "cvta.shared.u64 %rd5, %rd4;", "mul.wide.u32 %rd6, %r1, 16;"]
    chosen = [*shared, "setp.eq.u64 %p3, %rd2, 0;", "selp.b64 %rd7, %rd5, %rd2, %p3;", "add.s64 %rd8, %rd7, %rd6;"]
    mapped = [*shared, "mapa.u64 %rd7, %rd5, %r1;", "add.s64 %rd8, %rd7, 16;"]
    plain = ["mul.wide.u32 %rd6, %r1, 16;", "add.s64 %rd8, %rd2, %rd6;"]
    loop = ["add.s64 %rd8, %rd8, 32;", "add.s32 %r6, %r6, 1;", "setp.lt.u32 %p2, %r6, %r5;", "@%p2 bra L;"]
    kinds = (
        {"once": (chosen, []), "loop": (chosen, loop)}
        if bad
        else {"mapped": (mapped, []), "plain": (plain, []), "walk": (plain, loop)}
    )
    return "".join(
        kernel(f"{'bad' if bad else 'good'}_{access}_{kind}", *before, "L:", text, *after)
        for (access, text), (kind, (before, after)) in itertools.product(_ACCESSES.items(), kinds.items())
    )


SOURCES = {"tma-handoff": handoff, "never-drained": drained, "syscall": loads, "stack": stacks, "generic-on-shared": generics}


def ptxas() -> Path | None:
    """The compiler in Triton's wheel that knows all the targets; None without Triton."""
    try:
        import triton
    except ImportError:
        return None
    path = Path(triton.__file__).parent / "backends/nvidia/bin/ptxas-blackwell"
    return path if path.exists() else None


def compile_ptx(source: str, target: str) -> bytes:
    """The cubin of a source without its header. Raises RuntimeError with the compiler's words."""
    compiler = ptxas()
    if compiler is None:
        raise RuntimeError("no ptxas-blackwell: install triton")
    with tempfile.TemporaryDirectory() as folder:
        text, cubin = Path(folder, "k.ptx"), Path(folder, "k.cubin")
        text.write_text(_HEADER.format(version="9.0" if target.startswith("sm_110") else "8.8", target=target) + source)
        done = subprocess.run(
            [str(compiler), f"-arch={target}", str(text), "-o", str(cubin)], capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(done.stderr or done.stdout)
        return cubin.read_bytes()


def main() -> None:
    """Writes all fixtures."""
    import zstandard

    FIXTURES.mkdir(exist_ok=True)
    for (rule, source), verdict, target in itertools.product(SOURCES.items(), ("bad", "good"), TARGETS):
        cubin = compile_ptx(source(verdict == "bad"), target)
        path = FIXTURES / f"{rule}-{verdict}-{target}.cubin.zst"
        path.write_bytes(zstandard.ZstdCompressor(level=19).compress(cubin))


if __name__ == "__main__":
    main()
