"""Compares findings of two runs: a baseline that only new findings may exceed, and what changed between two releases."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from blockscale.guard.audit.engine import Finding

Key = tuple[str, str, str, str]


class BaselineError(ValueError):
    """A baseline that cannot be read."""


def place(file: str) -> str:
    """A file without what changes between machines and releases: the member of an archive, or the last part of a path."""
    return file.rsplit("!/", 1)[1] if "!/" in file else file.rsplit("/", 1)[-1]


def key(finding: Finding) -> Key:
    """What makes two findings the same: rule, target, kernel and place. Offsets move with every compiler."""
    return finding.rule, finding.arch, finding.kernel, place(finding.file)


def load(path: Path) -> Counter[Key]:
    """Keys of the findings in a JSON report that ``blockscale audit --json`` wrote, with how often each occurs.

    Raises:
        BaselineError: no such file, or not such a report.
    """
    try:
        content: Any = json.loads(path.read_text())
        return Counter((f["rule"], f["arch"], f["kernel"], place(f["file"])) for f in content["findings"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BaselineError(f"{path}: not a report of `blockscale audit --json` ({error})") from error


def new(findings: Iterable[Finding], known: Counter[Key]) -> list[Finding]:
    """The findings beyond those that are known; the n-th of the same key is known if the baseline has n."""
    left = Counter(known)
    fresh = []
    for finding in findings:
        if left[key(finding)] > 0:
            left[key(finding)] -= 1
        else:
            fresh.append(finding)
    return fresh


@dataclass(frozen=True)
class Change:
    """What a release changed: findings only in the old, only in the new, and in both."""

    fixed: list[Finding]
    brought: list[Finding]
    kept: int


def compare(old: list[Finding], new_findings: list[Finding]) -> Change:
    """Findings by `key`, counted."""
    fixed = new(old, Counter(key(finding) for finding in new_findings))
    brought = new(new_findings, Counter(key(finding) for finding in old))
    return Change(fixed, brought, len(new_findings) - len(brought))
