import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PARTS = 4


@pytest.mark.parametrize("part", range(PARTS))
def test_kernels_give_the_bits_of_the_reference(part):
    env = dict(os.environ, PYTHONPATH=str(ROOT / "src"), TRITON_INTERPRET="1", OMP_NUM_THREADS="1")
    command = [sys.executable, str(Path(__file__).parent / "interpreted.py"), str(part), str(PARTS)]
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == 10
