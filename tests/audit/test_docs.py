"""The example rule of docs/audit.md works as it stands, and the page names every rule."""

import re
from pathlib import Path

import pytest

from audit.support_audit import audit_bytes, cubin
from blockscale.guard.audit import RULES

PAGE = (Path(__file__).parents[2] / "docs" / "audit.md").read_text()


def test_every_rule_is_explained():
    assert set(re.findall(r"^\| `([a-z-]+)` \| (?:error|warning|note) \|", PAGE, re.MULTILINE)) == set(RULES)


@pytest.mark.parametrize("name", sorted(RULES))
def test_severities_agree(name):
    assert f"| `{name}` | {RULES[name].severity} |" in PAGE


def test_the_example_rule(monkeypatch, tmp_path):
    source = next(block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "RULE =" in block)
    assert len(source.splitlines()) <= 40
    space = {"__name__": "example"}
    exec(compile(source, "docs/audit.md", "exec"), space)
    monkeypatch.setitem(RULES, "sleeps", space["RULE"])
    assert audit_bytes(tmp_path, cubin("tma-handoff", "bad", "sm_90a"), "sleeps").findings == []
    data = bytearray(cubin("tma-handoff", "bad", "sm_90a"))
    # turns the first NOP into a NANOSLEEP
    at = data.index(bytes([0x18, 0x79]))
    data[at] = 0x5D
    assert len(audit_bytes(tmp_path, bytes(data), "sleeps").findings) == 1
