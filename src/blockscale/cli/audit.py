"""``blockscale audit``: what is really in a GPU library."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from blockscale import __version__
from blockscale.cli._shared import FINDINGS, WRONG_USE, consoles, print_json, wrong_use
from blockscale.report import Column, Table, table_to_rich, write_html, write_json

if TYPE_CHECKING:
    from blockscale.guard.audit.engine import Config, Result
    from blockscale.guard.audit.readers import NotChecked

_SHOWN = 40
#: families of each rule and target whose instructions the HTML page shows
_EXAMPLES = 3


class _ScanByDefault(TyperGroup):
    """``audit TARGET`` means ``audit scan TARGET``; a file named like a command is written ./diff."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["scan", *args]
        return super().parse_args(ctx, args)


audit_app = typer.Typer(
    cls=_ScanByDefault,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Read the kernels of any library, without a GPU, and say which carry known faults. `audit X` is `audit scan X`.",
)

_TARGETS = "Files, wheels, folders, installed packages; triton-cache, inductor-cache, cute-cache, flashinfer-cache."
_Rule = Annotated[list[str], typer.Option("--rule", help="Only this rule (repeatable); also turns on experimental ones.")]
_Arch = Annotated[list[str], typer.Option("--arch", help="Only this target, such as sm_100a (repeatable).")]
_Kernel = Annotated[str | None, typer.Option("--kernel", metavar="REGEX", help="Only kernels whose mangled name matches.")]
_StackLimit = Annotated[int, typer.Option(help="Bytes of stack a thread may use.", min=0)]
_Jobs = Annotated[int, typer.Option("--jobs", "-j", help="Processes; 0: one a core.", min=0)]
_Memory = Annotated[float, typer.Option("--memory", metavar="GIB", help="Memory of the run beyond the interpreter.", min=0.125)]
_Disassemble = Annotated[bool, typer.Option(help="Let nvdisasm, where installed, print the HTML page's instructions.")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")]


@audit_app.command()
def scan(
    targets: Annotated[list[str] | None, typer.Argument(help=_TARGETS)] = None,
    pid: Annotated[int | None, typer.Option(help="Audit the libraries that a running process has loaded.")] = None,
    rule: _Rule = [],  # noqa: B006
    arch: _Arch = [],  # noqa: B006
    kernel: _Kernel = None,
    stack_limit: _StackLimit = 1024,
    fail_on: Annotated[str, typer.Option(help="Least severity for exit status 1: note, warning, error, never.")] = "warning",
    baseline: Annotated[Path | None, typer.Option(help="JSON report of an earlier run; only findings beyond it count.")] = None,
    jobs: _Jobs = 0,
    memory: _Memory = 2.0,
    as_json: _AsJson = False,
    json_out: Annotated[Path | None, typer.Option(help="Write the JSON report to this file, besides what is printed.")] = None,
    sarif: Annotated[Path | None, typer.Option(help="Write SARIF 2.1.0 for code-scanning sites to this file.")] = None,
    html: Annotated[Path | None, typer.Option(help="Write one HTML page with instructions of examples to this file.")] = None,
    disassemble: _Disassemble = True,
) -> None:
    """Audit targets. Exit status 0: clean, 1: findings at or above --fail-on, 2: something could not be read."""
    from blockscale.cli._audit_report import as_report
    from blockscale.guard.audit import baseline as known
    from blockscale.guard.audit.engine import as_json as document
    from blockscale.guard.audit.engine import audit_files
    from blockscale.guard.audit.examples import disassembler
    from blockscale.guard.audit.readers import UnknownTargetError, mapped_files, resolve
    from blockscale.guard.audit.sarif import as_sarif

    if fail_on not in (*_severities(), "never"):
        wrong_use(f"--fail-on {fail_on!r}: one of {', '.join(_severities())}, never")
    if not targets and pid is None:
        wrong_use("nothing to audit: name a file, a folder, an installed package or a cache, or give --pid")
    config = _config(rule, arch, kernel, stack_limit, jobs, memory, examples=_EXAMPLES if html else 0)
    try:
        found = [item for target in targets or () for item in resolve(target)]
        found += list(mapped_files(pid)) if pid is not None else []
        accepted = known.load(baseline) if baseline else Counter()
        result = audit_files(found, config)
    except (UnknownTargetError, known.BaselineError) as error:
        wrong_use(str(error))
    total = len(result.findings)
    result.findings = known.new(result.findings, accepted)
    if json_out:
        write_json(json_out, document(result))
    if sarif:
        write_json(sarif, as_sarif(result, __version__))
    if html:
        title = "Audit of " + ", ".join(targets or [f"process {pid}"])
        write_html(html, as_report(result, title, disassembler() if disassemble else None))
    if as_json:
        print_json(document(result))
    else:
        _print(result, total)
    raise typer.Exit(_status(result, fail_on))


@audit_app.command()
def diff(
    old: Annotated[str, typer.Argument(help="The old release: any target of `audit`.")],
    new: Annotated[str, typer.Argument(help="The new release.")],
    rule: _Rule = [],  # noqa: B006
    arch: _Arch = [],  # noqa: B006
    kernel: _Kernel = None,
    stack_limit: _StackLimit = 1024,
    jobs: _Jobs = 0,
    memory: _Memory = 2.0,
    as_json: _AsJson = False,
) -> None:
    """Show what a release fixed and what it brought. Exit status 1 when it brought something."""
    from blockscale.cli._audit_report import families_table
    from blockscale.guard.audit.baseline import compare
    from blockscale.guard.audit.engine import audit
    from blockscale.guard.audit.readers import UnknownTargetError

    config = _config(rule, arch, kernel, stack_limit, jobs, memory)
    try:
        before, after = audit([old], config), audit([new], config)
    except UnknownTargetError as error:
        wrong_use(str(error))
    change = compare(before.findings, after.findings)
    not_checked = [*before.not_checked, *after.not_checked]
    if as_json:
        sides = {"fixed": change.fixed, "brought": change.brought}
        lists: dict[str, Any] = {name: [vars(finding) for finding in findings] for name, findings in sides.items()}
        print_json({**lists, "kept": change.kept, "not_checked": [vars(item) for item in not_checked]})
    else:
        out, _ = consoles()
        gone, fresh = len(change.fixed), len(change.brought)
        out.print(f"{before.kernels:,} -> {after.kernels:,} kernels; findings: {gone:,} gone, {change.kept:,} kept, {fresh:,} new")
        for title, findings in (("gone", change.fixed), ("new", change.brought)):
            if findings:
                out.print(table_to_rich(families_table(title, findings, _SHOWN)))
        _print_not_checked(out.print, not_checked)
    raise typer.Exit(WRONG_USE if before.unreadable or after.unreadable else FINDINGS if change.brought else 0)


@audit_app.command()
def rules() -> None:
    """List the rules."""
    from blockscale.guard.audit.rules import RULES

    out, _ = consoles()
    rows = [
        {"id": rule.id, "severity": rule.severity, "default": "yes" if rule.default else "no", "summary": rule.summary}
        for rule in RULES.values()
    ]
    columns = tuple(Column(name, name, align="left") for name in ("id", "severity", "default", "summary"))
    out.print(table_to_rich(Table("", columns, rows)))


def _severities() -> tuple[str, ...]:
    from blockscale.guard.audit.rules import SEVERITIES

    return SEVERITIES


def _config(
    rule: list[str], arch: list[str], kernel: str | None, stack_limit: int, jobs: int, memory: float, *, examples: int = 0
) -> Config:
    from blockscale.guard.audit.engine import Config
    from blockscale.guard.audit.limits import Limits
    from blockscale.guard.audit.rules import Options, UnknownRuleError, select

    try:
        select(rule)
        re.compile(kernel or "")
    except UnknownRuleError as error:
        wrong_use(str(error))
    except re.error as error:
        wrong_use(f"--kernel {kernel!r} is no regular expression: {error}")
    for name in arch:
        if not re.fullmatch(r"sm_\d+[af]?", name):
            wrong_use(f"--arch {name!r}: a target such as sm_90a, sm_100a or sm_120f")
    limits = Limits.for_memory(int(memory * (1 << 30)))
    return Config(tuple(rule), tuple(arch), kernel, Options(stack_limit), limits, jobs, examples)


def _status(result: Result, fail_on: str) -> int:
    if result.unreadable:
        return WRONG_USE
    levels = _severities()
    worst = max((levels.index(finding.severity) for finding in result.findings), default=-1)
    return FINDINGS if fail_on != "never" and worst >= levels.index(fail_on) else 0


def _print(result: Result, total: int) -> None:
    from blockscale.cli._audit_report import families_table

    out, _ = consoles()
    targets = ", ".join(f"{name} {count:,}" for name, count in sorted(result.by_arch.items()))
    out.print(f"{result.kernels:,} kernels in {result.cubins:,} cubins ({targets or 'none'})", highlight=False)
    if total != len(result.findings):
        out.print(f"{total - len(result.findings):,} findings are in the baseline")
    if result.findings:
        out.print(table_to_rich(families_table("Findings", result.findings, _SHOWN)))
    else:
        out.print("no findings")
    _print_not_checked(out.print, result.not_checked)


def _print_not_checked(show: Callable[..., None], not_checked: list[NotChecked]) -> None:
    """What was seen and not judged, by reason."""
    from blockscale.cli._audit_report import WHAT_NO_BINARY_SHOWS, reasons

    found = reasons(not_checked)
    show("Not checked:" if found else "Everything that was found was checked.")
    for error, why, count, first in found[:_SHOWN]:
        where = f"{first.file}: {first.what}"
        show(f"  {'error: ' if error else ''}{why}: {count:,}, first {where}", highlight=False, markup=False)
    show(WHAT_NO_BINARY_SHOWS)


__all__ = ["audit_app", "diff", "rules", "scan"]
