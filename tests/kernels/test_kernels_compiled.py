"""Kernels compiled for every target, without a GPU, by the installed Triton and by the oldest that is supported."""

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}
#: where ``make setup`` puts the oldest supported Triton, beside the environment's own
OLDEST = Path(sys.prefix) / "triton-3.6.0"


@cache
def lines(first, count, archs, path=()):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), str(ROOT / "src")]), TRITON_DEFAULT_FP_FUSION="0")
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).parent / "variants.py"), str(first), str(count), *map(str, archs)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


#: 16-byte or 8-byte loads and stores that a kernel has at least; a kernel that only reads stores a number
WIDE = {"LDG": 4, "STG": 4}
#: codes of four bits: all that a thread reads of them are two pieces of 16 bytes
FEWER = {"dequantize_columns": {"LDG": 2}}
READERS = ("group_amax", "amax_of_groups", "multipliers")


def check(found, count, version=None):
    *kernels, last = found
    assert version is None or last["triton"] == version
    assert len({facts["kernel"] for facts in kernels}) == 12
    assert len(kernels) > count
    for facts in kernels:
        assert facts["stack"] == facts["local"] == facts["generic"] == facts["syscalls"] == 0, facts
        if facts["kernel"] not in READERS:
            for kind, least in (WIDE | FEWER.get(facts["kernel"], {})).items():
                assert facts["wide"].get(kind, 0) >= least, facts


#: variants of each kernel, by architecture: which, and how many; other ones on each
SHARE = {90: (0, 2), 100: (2, 1), 103: (3, 1), 120: (4, 1)}


@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_compiled_by_the_installed_triton(arch):
    first, count = SHARE[arch]
    check(lines(first, count, (arch,)), 10 * count)


def audited(found):
    """Nothing that `blockscale audit --fail-on note` would fail on, and nothing left undecided."""
    for facts in found[:-1]:
        assert (facts["audited"], facts["findings"], facts["not_checked"]) == (1, [], []), facts


@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_kernels_pass_the_audit(arch):
    audited(lines(*SHARE[arch], (arch,)))


@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not beside the environment: run make setup")
def test_kernels_of_the_oldest_triton_pass_the_audit():
    audited(lines(1, 1, (90, 120), (OLDEST,)))


@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not beside the environment: run make setup")
def test_compiled_by_the_oldest_triton():
    check(lines(1, 1, (90, 120), (OLDEST,)), 20, "3.6.0")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_all_variants(arch):
    check(lines(0, 0, (arch,)), 130)
    audited(lines(0, 0, (arch,)))


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not beside the environment: run make setup")
@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_all_variants_by_the_oldest_triton(arch):
    check(lines(0, 0, (arch,), (OLDEST,)), 130, "3.6.0")
