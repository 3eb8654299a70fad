"""Targets whose instruction tables were checked against the vendor's disassembler. Others are refused by name."""

from __future__ import annotations

import re

#: checked over more than 10^5 instructions each by tests/audit/test_against_nvdisasm.py
VERIFIED = frozenset({90, 100, 103, 110, 120, 121})
#: the first with bulk copies and the shared window register
FIRST_WITH_BULK_COPY = 90


def number(arch: str) -> int:
    """``"sm_100a"`` -> 100; 0 when it is no name of that form."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    return int(match.group(1)) if match else 0


def refusal(arch: str) -> str | None:
    """Why instructions of this target are not read; None when they are."""
    if number(arch) in VERIFIED:
        return None
    return f"the instruction table of {arch} has not been verified; only metadata was read"
