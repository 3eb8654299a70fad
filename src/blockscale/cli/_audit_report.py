"""An audit as tables and as a `Report`: what the terminal and the HTML page show."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from blockscale.guard.audit.engine import Finding, Result
from blockscale.guard.audit.examples import Example, shown, texts
from blockscale.guard.audit.names import family
from blockscale.guard.audit.readers import NotChecked
from blockscale.guard.audit.rules import RULES, SEVERITIES
from blockscale.report import Bars, Column, Line, Listing, Report, Section, Table
from blockscale.report.document import Value

#: palette: green for clean, then grey, orange, red-purple
_PARTS = (("clean", 3), ("note", 0), ("warning", 2), ("error", 5))
MOST_EXAMPLES = 40
WHAT_NO_BINARY_SHOWS = (
    "Nor what no binary shows: contracts between host and kernel, data-dependent indices, whether a race is ever lost."
)
_Group = tuple[str, str, str, str]


def families(findings: list[Finding]) -> list[tuple[_Group, list[Finding]]]:
    """Findings by (severity, rule, target, family), the worst first and the largest first within a rule."""
    groups: dict[_Group, list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.rule, finding.arch, family(finding.kernel)), []).append(finding)
    return sorted(groups.items(), key=lambda item: (-_level(item[0][0]), item[0][1], -len(item[1]), item[0]))


def _level(severity: str) -> int:
    return list[str](SEVERITIES).index(severity)


def families_table(title: str, findings: list[Finding], limit: int) -> Table:
    """`families` with the first finding of each."""
    ordered = families(findings)
    rows: list[dict[str, Value]] = [
        {"severity": severity, "rule": rule, "arch": arch, "kernels": len(members), "family": name, "example": members[0].detail}
        for (severity, rule, arch, name), members in ordered[:limit]
    ]
    columns = [Column(name, name, align="left") for name in ("severity", "rule", "arch", "kernels", "family", "example")]
    columns[3] = Column("kernels", "kernels")
    left = len(ordered) - len(rows)
    return Table(title, columns, rows, note=f"and {left:,} more families; --json lists every kernel" if left > 0 else "")


def reasons(not_checked: list[NotChecked]) -> list[tuple[bool, str, int, NotChecked]]:
    """What was seen and not judged, by reason: whether it is an error, why, how many, the first; errors first."""
    found: dict[tuple[bool, str], list[NotChecked]] = {}
    for item in not_checked:
        found.setdefault((item.error, item.why.split(" (write at", 1)[0]), []).append(item)
    ordered = sorted(found.items(), key=lambda entry: (not entry[0][0], -len(entry[1])))
    return [(error, why, sum(item.count for item in items), items[0]) for (error, why), items in ordered]


def as_report(result: Result, title: str, tool: Path | None) -> Report:
    """The page. ``tool``: a disassembler for the examples, None to show encodings."""
    worst = _worst(result.findings)
    bad = sum(1 for severity in worst.values() if severity != "note")
    lead = f"{result.kernels:,} kernels in {result.cubins:,} cubins; {bad:,} with an error or a warning."
    sections = [
        Section("Kernels by target", [_bars(result, worst)]),
        Section("Findings by family", [families_table("", result.findings, 200)] if result.findings else ["None."]),
        Section("What the rules mean", [_meaning({finding.rule for finding in result.findings})]),
        Section("Examples", _examples(result, tool) or ["None."]),
        Section("Not checked", _not_checked(result)),
    ]
    return Report(title, lead, [section for section in sections if result.findings or "rules" not in section.title])


def _worst(findings: list[Finding]) -> dict[tuple[str, str, str], str]:
    """Of each kernel with a finding: its worst severity."""
    worst: dict[tuple[str, str, str], str] = {}
    for finding in findings:
        key = (finding.arch, finding.file, finding.kernel)
        if _level(finding.severity) >= _level(worst.get(key, "note")):
            worst[key] = finding.severity
    return worst


def _bars(result: Result, worst: dict[tuple[str, str, str], str]) -> Bars:
    counts = Counter((arch, severity) for (arch, _, _), severity in worst.items())
    rows = []
    for arch, kernels in sorted(result.by_arch.items(), key=lambda item: (len(item[0]), item[0])):
        found = [counts[arch, name] for name, _ in _PARTS[1:]]
        # a kernel that a file holds twice under one name counts once among the findings
        rows.append((arch, [max(kernels - sum(found), 0), *found]))
    return Bars("kernels by their worst finding", _PARTS, rows)


def _meaning(rules: set[str]) -> Table:
    rows = [{"rule": rule.id, "severity": rule.severity, "meaning": rule.summary} for rule in RULES.values() if rule.id in rules]
    return Table("", [Column(name, name, align="left") for name in ("rule", "severity", "meaning")], rows)


def _examples(result: Result, tool: Path | None) -> list[Listing]:
    order = {rule: index for index, rule in enumerate(RULES)}
    kept = sorted(result.examples, key=lambda example: (order[example.rule], example.arch, example.kernel))[:MOST_EXAMPLES]
    details = {(f.rule, f.arch, f.kernel, f.offset): f.detail for f in result.findings}
    found = []
    for example, text in zip(kept, texts(kept, tool), strict=True):
        detail = details.get((example.rule, example.arch, example.kernel, example.at))
        # None: it is in the baseline
        if detail is not None:
            found.append(Listing(f"{example.rule}, {example.arch}: {family(example.kernel)}", _lines(example, text), detail))
    return found


def _lines(example: Example, text: dict[int, str]) -> list[Line]:
    lines = []
    for pc in shown(example):
        if pc is None:
            lines.append(Line("", "..."))
            continue
        remark = example.remarks.get(pc, "")
        if pc == example.at:
            remark = f"{example.rule}" + (f": {remark}" if remark else "")
        lines.append(Line(f"{pc:#06x}", text.get(pc, ""), remark, pc == example.at))
    return lines


def _not_checked(result: Result) -> list[Table | str]:
    rows: list[dict[str, Value]] = [
        {"why": ("error: " if error else "") + why, "count": count, "first": f"{first.file}: {first.what}"}
        for error, why, count, first in reasons(result.not_checked)
    ]
    columns = [Column("why", "why", align="left"), Column("count", "count"), Column("first", "first", align="left")]
    return [Table("", columns, rows) if rows else "Everything that was found was checked.", WHAT_NO_BINARY_SHOWS]
