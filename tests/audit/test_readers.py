"""Readers: every way in gives the same kernels; damaged input ends its own piece, with an error, and nothing else."""

import io
import random
import struct
import subprocess
import sys
import time
import zipfile

import pytest

from audit.support_audit import audit_bytes, cubin, zstandard
from blockscale.guard.audit import Config, Limits, UnknownTargetError, audit
from blockscale.guard.audit.elf import Elf
from blockscale.guard.audit.readers.fatbin import CONTAINER, ENTRY
from blockscale.guard.audit.readers.model import NotChecked
from blockscale.guard.audit.readers.scan import scan


def entry(data: bytes, *, kind=2, arch=90, flags=0x100000, packed=0, size=0) -> bytes:
    padded = data + b"\0" * (-len(data) % 8)
    return ENTRY.pack(kind, 0x101, ENTRY.size, len(padded), packed, 0, 8, 1, arch, 0, 0, flags | 0x11, 0, size) + padded


def container(*entries: bytes) -> bytes:
    body = b"".join(entries)
    return CONTAINER.pack(0xBA55ED50, 1, 16, len(body)) + body


@pytest.fixture(scope="module")
def code() -> bytes:
    return cubin("tma-handoff", "bad", "sm_90a")


def fatbins(code: bytes) -> dict[str, bytes]:
    import lz4.block

    zstd, block = zstandard.ZstdCompressor().compress(code), lz4.block.compress(code, store_size=False)
    return {
        "raw": container(entry(code)),
        "zstd": container(entry(zstd, flags=0x108000, packed=len(zstd), size=len(code))),
        "lz4": container(entry(block, flags=0x102000, packed=len(block), size=len(code))),
    }


@pytest.mark.parametrize("codec", ["raw", "zstd", "lz4"])
def test_fat_binaries_in_a_library(codec, code, tmp_path):
    library = b"\x7fELF" + b"\1" * 1021 + fatbins(code)[codec] + b"tail" * 100
    result = audit_bytes(tmp_path, library, "tma-handoff", name="lib.so")
    assert (result.cubins, result.kernels, len(result.findings)) == (1, 25, 25)
    assert {finding.arch for finding in result.findings} == {"sm_90a"}
    assert result.not_checked == []


def test_a_container_larger_than_the_window(code, tmp_path):
    body = b"".join([entry(code)] * 200)
    assert len(body) > 8 << 20
    result = audit_bytes(tmp_path, b"x" * 13 + CONTAINER.pack(0xBA55ED50, 1, 16, len(body)) + body, "stack", name="big.so")
    assert (result.cubins, result.kernels) == (200, 5000)


def test_archives_folders_and_processes_agree(code, tmp_path):
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("lib/x.so", b"\0" * 3 + fatbins(code)["zstd"])
        archive.writestr("k/one.cubin", code)
        archive.writestr("notes.txt", "nothing")
    folder = tmp_path / "folder" / "deep"
    folder.mkdir(parents=True)
    (folder / "one.cubin").write_bytes(code)
    (folder / "x.so").write_bytes(fatbins(code)["raw"])
    config = Config(("tma-handoff",), processes=2)
    zipped, plain = audit([str(wheel)], config), audit([str(tmp_path / "folder")], config)
    assert zipped.kernels == plain.kernels == len(zipped.findings) == len(plain.findings) == 50
    assert {finding.file for finding in zipped.findings} == {f"{wheel}!/lib/x.so", f"{wheel}!/k/one.cubin"}
    assert sorted(f.offset for f in zipped.findings) == sorted(f.offset for f in plain.findings)


def test_ptx_is_listed_as_not_checked(tmp_path):
    result = audit_bytes(tmp_path, b"//\n// a comment\n/* more */\n.version 8.7\n.target sm_90a\n.address_size 64\n", name="k.ptx")
    assert [(item.what, item.error) for item in result.not_checked] == [("sm_90a PTX", False)]
    assert not result.unreadable


def test_other_entries_are_listed(code, tmp_path):
    result = audit_bytes(tmp_path, container(entry(b"12345678", kind=8), entry(code)), name="x.fatbin")
    assert result.kernels == 25
    assert [item.what for item in result.not_checked] == ["sm_90a entry of kind 8"]


def test_an_installed_package_and_an_unknown_target():
    assert audit(["iniconfig"], Config(processes=1)).kernels == 0
    with pytest.raises(UnknownTargetError, match="no installed package"):
        audit(["no-such-package-here"])


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_running_process():
    from blockscale.guard.audit.readers import mapped_files

    names = [str(item) for item in mapped_files(__import__("os").getpid()) if not isinstance(item, NotChecked)]
    assert any("libc" in name or "python" in name for name in names)
    with pytest.raises(UnknownTargetError):
        list(mapped_files(2**22 + 1))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (lambda c: fatbins(c)["zstd"][:3000], "needs"),
        (lambda c: container(entry(zstandard.ZstdCompressor().compress(c)[:900], flags=0x8000, packed=900, size=len(c))), "zstd"),
        (lambda c: container(entry(zstandard.ZstdCompressor().compress(c), flags=0x8000, packed=900, size=1 << 40)), "limit"),
        (lambda c: container(entry(b"\x10abcd" * 8, flags=0x2000, packed=40, size=1 << 28)), "cannot hold"),
        (lambda c: container(entry(c[: len(c) // 2])), "section table"),
        (lambda c: c[:40] + struct.pack("<Q", 1 << 60) + c[48:], "limit"),
    ],
)
def test_damage_is_reported_and_the_rest_goes_on(data, why, code, tmp_path):
    (tmp_path / "a.bin").write_bytes(data(code))
    (tmp_path / "b.cubin").write_bytes(code)
    result = audit([str(tmp_path)], Config(("tma-handoff",), processes=1))
    assert len(result.findings) == 25
    assert result.unreadable
    assert [why in item.why for item in result.not_checked if item.error] == [True]


def test_a_frame_that_lies_about_its_size(code, tmp_path):
    """The frame's own size must not overrule the declared one: that is how a bomb gets in."""
    bomb = zstandard.ZstdCompressor().compress(b"\0" * (64 << 20))
    result = audit_bytes(tmp_path, container(entry(bomb, flags=0x8000, packed=len(bomb), size=4096)))
    assert [item.why for item in result.not_checked] == ["zstd image at 80: zstd frame declares 67,108,864 bytes, its entry 4,096"]


def test_an_archive_beyond_the_limit(tmp_path):
    path = tmp_path / "bomb.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("a", b"\0" * (20 << 20))
    result = audit([str(path)], Config(limits=Limits(file_bytes=1 << 20), processes=1))
    assert [item.why for item in result.not_checked] == ["decompresses to more than the limit of one file"]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_memory_is_bounded(code, tmp_path):
    """Ten images of 30 MiB in one file: read in 256 MiB, or said to need more; never more than what was allowed."""
    big = bytearray(code)
    # the text of the first kernel becomes a section of 30 MiB
    table = Elf.parse(code)
    offset = struct.unpack_from("<Q", big, 40)[0]
    index = next(i for i, name in enumerate(table.names) if name.startswith(".text."))
    struct.pack_into("<QQ", big, offset + 64 * index + 24, len(big), 30 << 20)
    nop = bytes.fromhex("18790000000000000000000000c00f00")
    packed = zstandard.ZstdCompressor().compress(bytes(big) + nop * ((30 << 20) // 16))
    image = entry(packed, flags=0x108000, packed=len(packed), size=len(big) + (30 << 20))
    (tmp_path / "big.so").write_bytes(container(*[image] * 10) + b"x" * (9 << 20))
    program = (
        "import resource, sys\nfrom blockscale.guard.audit import Config, Limits, audit\n"
        "def peak(who): return resource.getrusage(who).ru_maxrss << 10\n"
        "before = peak(resource.RUSAGE_SELF)\n"
        "result = audit([sys.argv[1]], Config(limits=Limits.for_memory(256 << 20), processes=2))\n"
        "print(result.cubins, peak(resource.RUSAGE_CHILDREN) - before, peak(resource.RUSAGE_SELF) - before)\n"
        "print(*{item.why for item in result.not_checked}, sep='|')"
    )
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path / "big.so")], capture_output=True, text=True, check=True)
    numbers, why = done.stdout.splitlines()
    cubins, worker, main = map(int, numbers.split())
    assert (cubins, why) == (10, "") or "memory" in why
    assert 2 * worker + main < 256 << 20
    with pytest.raises(ValueError, match="memory_bytes"):
        Limits.for_memory(1 << 20)


def test_headers_with_many_comments_take_no_time():
    """One pattern for comments and version backtracks for minutes on this."""
    started = time.perf_counter()
    assert list(scan(io.BytesIO(b"//" * 8 + b"/* x */ \n" * 8000), "x.h", Limits())) == []
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("seed", range(4))
def test_random_damage_never_raises(seed, code, tmp_path):
    """The 10^6 inputs of the fuzzing job start from these."""
    rng = random.Random(seed)
    seeds = [code, *fatbins(code).values()]
    for number in range(60):
        data = bytearray(rng.choice(seeds))
        for _ in range(rng.choice((1, 3, 30))):
            data[rng.randrange(min(len(data), rng.choice((64, 400, len(data)))))] = rng.randrange(256)
        started = time.perf_counter()
        audit_bytes(tmp_path, bytes(data[: rng.randrange(len(data))] if number % 5 == 0 else data), name="f.bin")
        assert time.perf_counter() - started < 5
