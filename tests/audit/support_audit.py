"""What the audit's tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

zstandard = pytest.importorskip("zstandard")
pytest.importorskip("lz4")

from blockscale.guard.audit import Config, Result, audit  # noqa: E402

FIXTURES = Path(__file__).parent / "fixtures"


def cubin(rule: str, verdict: str, target: str) -> bytes:
    """A stored fixture."""
    return zstandard.ZstdDecompressor().decompress((FIXTURES / f"{rule}-{verdict}-{target}.cubin.zst").read_bytes())


def audit_bytes(folder: Path, data: bytes, *rules: str, name: str = "k.cubin") -> Result:
    """Audits bytes as a file, in this process."""
    path = folder / name
    path.write_bytes(data)
    return audit([str(path)], Config(rules, processes=1))
