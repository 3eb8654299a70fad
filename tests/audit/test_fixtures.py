"""Every bad fixture is found and every good one is silent, on each target, by its own rule."""

import pytest

from audit.ptx_sources import SOURCES, TARGETS, compile_ptx, ptxas
from audit.support_audit import audit_bytes, cubin

BAD = [(rule, target) for rule in SOURCES for target in TARGETS if rule != "syscall" or target == "sm_120a"]
#: the same sources on targets that have the instruction
GOOD = [(rule, "good", target) for rule in SOURCES for target in TARGETS]
GOOD += [("syscall", "bad", target) for target in TARGETS if target != "sm_120a"]


@pytest.mark.parametrize(("rule", "target"), BAD)
def test_bad_kernels_are_found(rule, target, tmp_path):
    result = audit_bytes(tmp_path, cubin(rule, "bad", target), rule)
    assert result.kernels >= 12
    assert len({finding.kernel for finding in result.findings}) == len(result.findings) == result.kernels
    assert {(finding.rule, finding.arch) for finding in result.findings} == {(rule, target)}
    assert not result.unreadable


@pytest.mark.parametrize(("rule", "verdict", "target"), GOOD)
def test_good_kernels_are_silent(rule, verdict, target, tmp_path):
    result = audit_bytes(tmp_path, cubin(rule, verdict, target), rule)
    assert result.kernels >= 12
    assert [finding.kernel for finding in result.findings] == []
    assert result.not_checked == []


@pytest.mark.parametrize("target", TARGETS)
def test_good_kernels_are_silent_under_all_rules(target, tmp_path):
    for rule in ("tma-handoff", "never-drained", "stack"):
        result = audit_bytes(tmp_path, cubin(rule, "good", target))
        assert [(finding.rule, finding.kernel) for finding in result.findings if finding.severity != "note"] == []


def test_handoff_points_at_the_write(tmp_path):
    result = audit_bytes(tmp_path, cubin("tma-handoff", "bad", "sm_90a"), "tma-handoff")
    offsets = [finding.offset for finding in result.findings]
    assert all(offset and offset % 16 == 0 for offset in offsets)
    assert all(f"{finding.offset:#x}" in finding.detail for finding in result.findings)


def test_syscall_names_the_call(tmp_path):
    found = {
        finding.kernel: finding.detail for finding in audit_bytes(tmp_path, cubin("syscall", "bad", "sm_120a"), "syscall").findings
    }
    assert "__cuda_syscall_cp_async_bulk_tensor_2d_tile_unicast" in found["bad_2d_once"]
    assert "3.55 GiB on 170 SMs" in found["bad_2d_once"]


@pytest.mark.skipif(ptxas() is None, reason="needs the ptxas of Triton's wheel")
@pytest.mark.parametrize(("rule", "target"), [("tma-handoff", "sm_100a"), ("syscall", "sm_120a"), ("stack", "sm_90a")])
def test_sources_still_compile_to_what_is_stored(rule, target, tmp_path):
    """A newer compiler must give the same verdicts, though not the same bytes."""
    bad = audit_bytes(tmp_path, compile_ptx(SOURCES[rule](True), target), rule)
    good = audit_bytes(tmp_path, compile_ptx(SOURCES[rule](False), target), rule)
    assert (len(bad.findings), len(good.findings)) == (bad.kernels, 0)
