"""Runs the rules over everything a target holds, in several processes, in bounded memory."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from blockscale.guard.audit.cubin import Cubin, Kernel
from blockscale.guard.audit.elf import Elf
from blockscale.guard.audit.examples import Example, cut
from blockscale.guard.audit.limits import Limits, MalformedError
from blockscale.guard.audit.names import family
from blockscale.guard.audit.readers import Image, NotChecked, Unit, decompress, plan, read, resolve, weight
from blockscale.guard.audit.rules import Hit, KernelView, Memory, Options, Rule, Severity, select
from blockscale.guard.audit.sass.archs import refusal

#: units that may wait for each process
_AHEAD = 3


@dataclass(frozen=True)
class Finding:
    """One finding. ``offset``: program counter in the kernel, None for the kernel as a whole. ``kernel`` is mangled."""

    rule: str
    severity: Severity
    arch: str
    kernel: str
    file: str
    offset: int | None
    detail: str


@dataclass(frozen=True)
class Config:
    """What to look at.

    Attributes:
        arch: names such as ``"sm_100a"``, empty for all.
        kernel: a regular expression for mangled names.
        processes: 0 for one a core.
        examples: families of each rule and target whose instructions are kept.
    """

    rules: tuple[str, ...] = ()
    arch: tuple[str, ...] = ()
    kernel: str | None = None
    options: Options = field(default_factory=Options)
    limits: Limits = field(default_factory=Limits)
    processes: int = 0
    examples: int = 0


@dataclass
class Result:
    """What an audit found.

    Attributes:
        kernels: how many were looked at, in all cubins.
        cubins, by_arch: cubins read, kernels by target.
        examples: instructions around the first finding of a family, when the configuration asks for some.
    """

    kernels: int = 0
    cubins: int = 0
    findings: list[Finding] = field(default_factory=list)
    not_checked: list[NotChecked] = field(default_factory=list)
    by_arch: Counter[str] = field(default_factory=Counter)
    examples: list[Example] = field(default_factory=list)

    def add(self, other: Result) -> None:
        """Takes in the result of another part."""
        self.kernels += other.kernels
        self.cubins += other.cubins
        self.findings += other.findings
        self.not_checked += other.not_checked
        self.by_arch += other.by_arch
        self.examples += other.examples

    @property
    def unreadable(self) -> bool:
        """Whether something was damaged or could not be opened."""
        return any(item.error for item in self.not_checked)


def audit(targets: Iterable[str], config: Config | None = None) -> Result:
    """Audits files, folders, archives, installed packages and caches.

    Raises:
        UnknownTargetError: a target that is none of these.
        UnknownRuleError: a rule that does not exist.
    """
    return audit_files([found for target in targets for found in resolve(target)], config)


def audit_files(found: Iterable[Path | NotChecked], config: Config | None = None) -> Result:
    """As `audit`, from a list of files."""
    config = config or Config()
    select(list(config.rules))
    result = Result()
    for part in _results(plan(found, config.limits), config):
        result.add(part)
    result.not_checked = _counted(result.not_checked)
    result.examples = _first_of_each(result.examples, config.examples)
    result.findings.sort(key=lambda f: (f.rule, f.arch, f.file, f.kernel, f.offset or 0))
    return result


def _results(units: Iterator[Unit | NotChecked], config: Config) -> Iterator[Result]:
    """Results in the order of the units; the next units wait until earlier ones are done."""
    processes = config.processes or os.cpu_count() or 1
    if processes == 1:
        worker = Worker(config)
        for unit in units:
            yield Result(not_checked=[unit]) if isinstance(unit, NotChecked) else worker.audit(unit)
        return
    # forked workers share what is imported; a worker is replaced by nothing: it keeps its verdicts
    context = multiprocessing.get_context("fork" if "fork" in multiprocessing.get_all_start_methods() else None)
    share = config.limits.memory_bytes // 2 // processes
    with ProcessPoolExecutor(processes, context, initializer=_start, initargs=(config, share)) as pool:
        waiting: deque[tuple[int, Future[Result]]] = deque()
        held = 0
        for unit in units:
            if isinstance(unit, NotChecked):
                yield Result(not_checked=[unit])
                continue
            waiting.append((weight(unit), pool.submit(_audit, unit)))
            held += weight(unit)
            while waiting and (len(waiting) > processes * _AHEAD or held > config.limits.waiting_bytes):
                size, future = waiting.popleft()
                yield future.result()
                held -= size
        while waiting:
            yield waiting.popleft()[1].result()


_worker: Worker | None = None


def _start(config: Config, share: int) -> None:
    """Prepares a worker process: it may take ``share`` bytes beyond what it has now."""
    global _worker
    _limit_memory(share)
    _worker = Worker(config)


def _limit_memory(share: int) -> None:
    try:
        import resource

        pages = int(Path("/proc/self/statm").read_text().split()[0])
    except (ImportError, OSError):
        # only Linux can say how much address space there is already; elsewhere the limits on images must do
        return
    _, most = resource.getrlimit(resource.RLIMIT_AS)
    wanted = pages * resource.getpagesize() + share
    resource.setrlimit(resource.RLIMIT_AS, (wanted if most == resource.RLIM_INFINITY else min(wanted, most), most))


def _audit(unit: Unit) -> Result:
    assert _worker is not None
    return _worker.audit(unit)


class Worker:
    """Audits units, one image at a time."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._rules = select(list(config.rules))
        self._name = re.compile(config.kernel) if config.kernel else None
        self._memory = Memory()
        self._shown: dict[tuple[str, str], set[str]] = {}

    def audit(self, unit: Unit) -> Result:
        """The result of one unit. A damaged image becomes an entry of ``not_checked``."""
        result = Result()
        for item in read(unit, self._config.limits):
            if isinstance(item, NotChecked):
                result.not_checked.append(item)
                continue
            try:
                self._image(item, result)
            except (MalformedError, MemoryError) as error:
                what = f"{item.arch or item.kind} image at {item.offset:,}"
                why = str(error) if isinstance(error, MalformedError) else "needs more memory than a worker may take; see --memory"
                result.not_checked.append(NotChecked(item.file, what, why, error=True))
        return result

    def _image(self, image: Image, result: Result) -> None:
        wanted = self._config.arch
        if image.kind == "ptx":
            if not wanted or image.arch in wanted:
                why = "PTX is compiled by the driver at load time; compile it with ptxas and audit the cubin"
                result.not_checked.append(NotChecked(image.file, f"{image.arch or ''} PTX".strip(), why))
            return
        if wanted and image.arch and not _may_hold(image.arch, wanted):
            return
        cubin = Cubin(Elf.parse(decompress(image, self._config.limits)), image.arch)
        if wanted and cubin.arch not in wanted:
            return
        result.cubins += 1
        refused = refusal(cubin.arch)
        if refused and any(rule.needs_code for rule in self._rules):
            names = ", ".join(rule.id for rule in self._rules if rule.needs_code)
            result.not_checked.append(NotChecked(image.file, f"{cubin.arch} code", f"{refused} (rules {names})"))
        rules = [rule for rule in self._rules if not (rule.needs_code and refused)]
        for kernel in cubin.kernels():
            if self._name is None or self._name.search(kernel.name):
                self._kernel(kernel, cubin.arch, image.file, rules, result)

    def _kernel(self, kernel: Kernel, arch: str, file: str, rules: list[Rule], result: Result) -> None:
        result.kernels += 1
        result.by_arch[arch] += 1
        view = KernelView(kernel, arch, self._config.options, self._memory)
        for rule in rules:
            for hit in rule.check(view):
                if isinstance(hit, Hit):
                    severity = hit.severity or rule.severity
                    result.findings.append(Finding(rule.id, severity, arch, kernel.name, file, hit.offset, hit.detail))
                    self._example(view, rule, hit, result)
                else:
                    result.not_checked.append(NotChecked(file, f"{arch} {kernel.name}", f"{rule.id} undecided: {hit.why}"))

    def _example(self, view: KernelView, rule: Rule, hit: Hit, result: Result) -> None:
        """Keeps the instructions of the first finding of a family."""
        families = self._shown.setdefault((rule.id, view.arch), set())
        if len(families) >= self._config.examples or family(view.kernel.name) in families:
            return
        if example := cut(view, rule.id, hit):
            families.add(family(view.kernel.name))
            result.examples.append(example)


def _first_of_each(examples: list[Example], most: int) -> list[Example]:
    """One example a family, as many families a rule and target as asked for: every worker sent its own."""
    kept: dict[tuple[str, str], dict[str, Example]] = {}
    for example in sorted(examples, key=lambda example: example.kernel):
        families = kept.setdefault((example.rule, example.arch), {})
        if len(families) < most:
            families.setdefault(family(example.kernel), example)
    return [example for families in kept.values() for example in families.values()]


def _may_hold(container: str, wanted: tuple[str, ...]) -> bool:
    """Whether an entry that its container calls ``sm_100`` may turn out to hold one of the wanted targets."""
    return any(name.rstrip("af") == container.rstrip("af") for name in wanted)


def _counted(items: list[NotChecked]) -> list[NotChecked]:
    """Equal entries once, with their number."""
    counts: Counter[tuple[str, str, str, bool]] = Counter()
    for item in items:
        counts[item.file, item.what, item.why, item.error] += item.count
    return [NotChecked(*key, count=count) for key, count in counts.items()]


def as_json(result: Result) -> dict[str, Any]:
    """The machine-readable form."""
    return {
        "kernels": result.kernels,
        "cubins": result.cubins,
        "kernels_by_arch": dict(sorted(result.by_arch.items())),
        "findings": [vars(finding) for finding in result.findings],
        "not_checked": [vars(item) for item in result.not_checked],
    }
