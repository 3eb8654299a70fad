"""Findings as SARIF 2.1.0, which code-scanning sites read: a finding points to its file and names its kernel, for want of lines."""

from __future__ import annotations

from typing import Any
from urllib.parse import quote

from blockscale.guard.audit.engine import Result
from blockscale.guard.audit.rules import RULES

_SCHEMA = "https://json.schemastore.org/sarif-2.1.0.json"
#: results of one run that sites accept; the rest is counted in a notification
MAX_RESULTS = 25_000


def as_sarif(result: Result, version: str) -> dict[str, Any]:
    """One run of one tool. ``version``: of blockscale."""
    order = {name: index for index, name in enumerate(RULES)}
    # the worst first, so that a cut takes away notes
    levels = {"error": 0, "warning": 1, "note": 2}
    findings = sorted(result.findings, key=lambda finding: levels[finding.severity])
    notes = [_notification(f"{item.file}: {item.what}: {item.why} ({item.count})", item.error) for item in result.not_checked]
    if len(findings) > MAX_RESULTS:
        notes.append(_notification(f"{len(findings) - MAX_RESULTS:,} more findings are left out", True))
    rules = [
        {"id": rule.id, "shortDescription": {"text": rule.summary}, "defaultConfiguration": {"level": rule.severity}}
        for rule in RULES.values()
    ]
    results = [
        {
            "ruleId": finding.rule,
            "ruleIndex": order[finding.rule],
            "level": finding.severity,
            "message": {"text": f"{finding.arch} {finding.kernel}: {finding.detail}"},
            "locations": [
                {
                    "physicalLocation": {"artifactLocation": {"uri": _uri(finding.file)}},
                    "logicalLocations": [{"fullyQualifiedName": finding.kernel, "kind": "function"}],
                }
            ],
            "partialFingerprints": {"kernel/v1": f"{finding.rule}:{finding.arch}:{finding.kernel}"},
        }
        for finding in findings[:MAX_RESULTS]
    ]
    driver = {"name": "blockscale audit", "version": version, "rules": rules}
    invocation = {"executionSuccessful": not result.unreadable, "toolExecutionNotifications": notes}
    run = {"tool": {"driver": driver}, "invocations": [invocation], "results": results}
    return {"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}


def _notification(text: str, warn: bool) -> dict[str, Any]:
    return {"message": {"text": text}, "level": "warning" if warn else "note"}


def _uri(file: str) -> str:
    return quote(file, safe="/!:")
