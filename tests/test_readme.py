"""Every Python block of the README runs as it stands."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[1] / "README.md"
BLOCKS = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)


def test_the_readme_has_examples():
    assert len(BLOCKS) == 8


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_block_runs(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    exec(compile(block, "README.md", "exec"), names)
    if "error" in names:
        assert 0.02 < names["error"] < 0.03
        assert (names["same"].rowwise.data == names["q"].rowwise.data).all()
    if "experts" in names:
        x, sizes = names["x"], names["sizes"]
        with names["bs"].autocast(names["experts"].recipe):
            assert (names["served"](x, sizes) == names["experts"](x, sizes)).all()
    if "moe" in names:
        assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in names["moe"].parameters())
