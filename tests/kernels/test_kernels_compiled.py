"""Kernels compiled for every target, without a GPU, by the installed Triton and by the oldest that is supported."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ARCHS = {90: "sm_90a", 100: "sm_100a", 103: "sm_103a", 120: "sm_120a"}
#: where ``make setup`` puts the oldest supported Triton, beside the environment's own
OLDEST = Path(sys.prefix) / "triton-3.6.0"


def lines(count, archs, path=()):
    env = dict(os.environ, PYTHONPATH=os.pathsep.join([*map(str, path), str(ROOT / "src")]), TRITON_DEFAULT_FP_FUSION="0")
    env.pop("TRITON_INTERPRET", None)
    command = [sys.executable, str(Path(__file__).parent / "variants.py"), str(count), *map(str, archs)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def check(found, count, version=None):
    *kernels, last = found
    assert version is None or last["triton"] == version
    assert len(kernels) > count
    for facts in kernels:
        assert facts["stack"] == facts["local"] == facts["generic"] == facts["syscalls"] == 0, facts
        if facts["kernel"].startswith("quantize"):
            assert facts["wide"].get("LDG", 0) >= 4, facts
            assert facts["wide"].get("STG", 0) >= 4, facts


@pytest.mark.parametrize(("arch", "count"), [(90, 4), (100, 2), (103, 2), (120, 3)], ids=ARCHS.values())
def test_compiled_by_the_installed_triton(arch, count):
    check(lines(count, [arch]), 3 * count)


@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not beside the environment: run make setup")
def test_compiled_by_the_oldest_triton():
    check(lines(1, [90, 120], [OLDEST]), 6, "3.6.0")


@pytest.mark.slow
@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_all_variants(arch):
    check(lines(0, [arch]), 40)


@pytest.mark.slow
@pytest.mark.skipif(not OLDEST.is_dir(), reason="Triton 3.6.0 is not beside the environment: run make setup")
@pytest.mark.parametrize("arch", ARCHS, ids=ARCHS.values())
def test_all_variants_by_the_oldest_triton(arch):
    check(lines(0, [arch], [OLDEST]), 40, "3.6.0")
