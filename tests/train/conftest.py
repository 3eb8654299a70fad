"""Text with structure that a model learns in a few steps."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread():
    """Small matrices; and the same bits whatever runs beside the tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """60 kB of statements in a small vocabulary."""
    draw = random.Random(7)
    names = ["alpha", "beta", "gamma", "delta", "scale", "block", "row", "column"]
    lines = [f"{draw.choice(names)} = {draw.choice(names)} + {draw.randrange(10)}\n" for _ in range(3500)]
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(lines))
    return path
