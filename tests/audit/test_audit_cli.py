"""The command: exit status, JSON, SARIF, baselines, diff, and the list of what was not checked."""

import json
import re

import pytest
from typer.testing import CliRunner

from audit.support_audit import cubin
from blockscale.cli import app
from blockscale.guard.audit.examples import disassembler
from blockscale.guard.audit.names import family

run = CliRunner().invoke


@pytest.fixture
def files(tmp_path):
    for verdict in ("bad", "good"):
        (tmp_path / f"{verdict}.cubin").write_bytes(cubin("tma-handoff", verdict, "sm_90a"))
    (tmp_path / "damaged.cubin").write_bytes(cubin("tma-handoff", "bad", "sm_90a")[:2000])
    return tmp_path


def audit(*arguments):
    return run(app, ["audit", *map(str, arguments), "-j", "1"])


def test_exit_status(files):
    assert audit(files / "good.cubin").exit_code == 0
    assert audit(files / "bad.cubin").exit_code == 1
    assert audit(files / "bad.cubin", "--fail-on", "never").exit_code == 0
    assert audit(files / "damaged.cubin").exit_code == 2
    assert audit(files / "nothing-here").exit_code == 2
    assert audit(files / "good.cubin", "--rule", "no-such-rule").exit_code == 2
    assert audit(files / "good.cubin", "--arch", "hopper").exit_code == 2


def test_json(files):
    done = audit(files / "bad.cubin", "--json")
    report = json.loads(done.stdout)
    assert report["kernels"] == 25
    assert report["not_checked"] == []
    found = [finding for finding in report["findings"] if finding["rule"] == "tma-handoff"]
    assert len(found) == 25
    assert set(found[0]) == {"rule", "severity", "arch", "kernel", "file", "offset", "detail"}
    assert found[0]["arch"] == "sm_90a"


def test_tables_say_what_was_not_checked(files):
    text = audit(files).stdout
    assert "53 kernels in 2 cubins" in text
    assert "error: " in text
    assert "tma-handoff" in text
    assert "error: section table" in text or "error: " in text
    assert "Nor what no binary shows" in text


def test_a_baseline_lets_only_new_findings_fail(files):
    report = files / "known.json"
    assert audit(files / "bad.cubin", "--kernel", "bad_word", "--json-out", report).exit_code == 1
    again = audit(files / "bad.cubin", "--kernel", "bad_word", "--baseline", report, "--json")
    assert (again.exit_code, json.loads(again.stdout)["findings"]) == (0, [])
    more = audit(files / "bad.cubin", "--baseline", report, "--json", "--rule", "tma-handoff")
    assert (more.exit_code, len(json.loads(more.stdout)["findings"])) == (1, 20)
    (files / "broken.json").write_text("{}")
    assert audit(files / "bad.cubin", "--baseline", files / "broken.json").exit_code == 2


def test_diff(files):
    fixed = json.loads(audit("diff", files / "bad.cubin", files / "good.cubin", "--rule", "tma-handoff", "--json").stdout)
    assert (len(fixed["fixed"]), len(fixed["brought"]), fixed["kept"], fixed["not_checked"]) == (25, 0, 0, [])
    damaged = audit("diff", files / "bad.cubin", files / "damaged.cubin", "--rule", "tma-handoff")
    assert damaged.exit_code == 2
    assert "Not checked:" in damaged.stdout
    assert audit("diff", files / "bad.cubin", files / "good.cubin", "--rule", "tma-handoff").exit_code == 0
    assert audit("diff", files / "good.cubin", files / "bad.cubin", "--rule", "tma-handoff").exit_code == 1


def test_sarif(files):
    path = files / "out.sarif"
    audit(files / "bad.cubin", "--sarif", path, "--rule", "tma-handoff")
    report = json.loads(path.read_text())
    assert report["version"] == "2.1.0"
    results = report["runs"][0]["results"]
    assert len(results) == 25
    rules = report["runs"][0]["tool"]["driver"]["rules"]
    assert {rules[result["ruleIndex"]]["id"] for result in results} == {"tma-handoff"} == {result["ruleId"] for result in results}
    assert results[0]["locations"][0]["physicalLocation"]["artifactLocation"]["uri"].endswith("bad.cubin")


def test_html_is_one_page_with_the_instructions_of_examples(files):
    page = files / "out.html"
    audit(files / "bad.cubin", "--html", page, "--rule", "tma-handoff", "--kernel", "bad_word_tensor$|bad_copy", "--no-disassemble")
    text = page.read_text()
    assert "<script" not in text
    assert "http" not in text
    assert re.findall(r"<title>(sm_90a [a-z]+: \d+)</title>", text) == ["sm_90a error: 6"]
    listings = text.split('class="listing"')[1:]
    assert len(listings) == 3
    for listing in listings:
        marked = re.findall(
            r'<tr class="marked"><td>(0x[0-9a-f]+)</td><td>([0-9a-f]{16} [0-9a-f]{16})</td><td>([^<]*)</td>', listing
        )
        assert [remark for _, _, remark in marked] == ["tma-handoff: writes shared memory"]
        assert "bulk store: reads shared memory later" in listing
        assert "this thread waits until at most" in listing
        # the line that is marked is the one that the finding names
        assert f"written at {marked[0][0].replace('0x0', '0x', 1)}" in listing


@pytest.mark.skipif(disassembler() is None, reason="no nvdisasm here")
def test_html_is_disassembled(files):
    page = files / "out.html"
    audit(files / "bad.cubin", "--html", page, "--rule", "tma-handoff", "--kernel", "bad_word_tensor$")
    assert re.search(r"STS \[R\d+(\+0x2000)?\], R\d+</td><td>tma-handoff: writes shared memory", page.read_text())


def test_html_without_findings(files):
    page = files / "out.html"
    audit(files / "good.cubin", "--html", page, "--rule", "tma-handoff")
    assert "sm_90a clean: 28" in page.read_text()


def test_rules_are_listed():
    text = run(app, ["audit", "rules"]).stdout
    assert all(name in text for name in ("syscall", "tma-handoff", "never-drained", "generic-on-shared", "stack"))


@pytest.mark.parametrize(
    ("mangled", "short"),
    [
        ("_ZN18transformer_engine8dispatch1kILb0EEEvv", "transformer_engine::dispatch::k"),
        ("_Z18symv_tma_ws_kernelILi2EEvv", "symv_tma_ws_kernel"),
        ("_ZN12_GLOBAL__N_11fEv", "(anonymous)::f"),
        ("_ZN999x", "_ZN999x"),
        ("plain_kernel", "plain_kernel"),
    ],
)
def test_families(mangled, short):
    assert family(mangled) == short
