import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = 4


def run(script, *arguments):
    """What the script prints."""
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, str(Path(__file__).parent / script), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_give_the_bits_of_the_reference(part):
    assert int(run("interpreted.py", part, PARTS)) == 10


@pytest.mark.parametrize("part", range(2))
def test_activations_give_the_bits_of_the_reference(part):
    assert int(run("interpreted_activation.py", part, 2)) == 20


@pytest.mark.slow
@pytest.mark.parametrize("part", range(8))
def test_all_combinations_of_activations_give_the_bits_of_the_reference(part):
    assert int(run("interpreted_activation.py", part, 0)) == 288
