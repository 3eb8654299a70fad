"""``bs.watch(model)``: counters of every tensor of a step, and the name of the first one that went wrong."""

from __future__ import annotations

import math
import warnings
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from rich.console import Console
from rich.live import Live
from torch import Tensor, nn

from blockscale.ops import checks
from blockscale.ops.tap import Seen
from blockscale.report import Table, table_to_rich, to_jsonable, write_heatmaps_png, write_html
from blockscale.watching.attach import Filter, attach
from blockscale.watching.findings import METRICS, Finding, find_first, find_past, measure
from blockscale.watching.history import History
from blockscale.watching.log import Log, ranked
from blockscale.watching.show import Latest, build_heatmap, build_page, build_table, in_words
from blockscale.watching.slots import Slots, Snapshot

_COLUMNS_KEPT = 512


class WatchStop(RuntimeError):  # noqa: N818  (asked for, not an error of the watch)
    """A step crossed what ``stop`` names. The message is the report; ``finding`` is what crossed it."""

    def __init__(self, finding: Finding, report: str) -> None:
        super().__init__(report)
        self.finding = finding


class Watch:
    """Counts what passes through the layers of a model. Made by :func:`watch`; see there.

    Attributes:
        layers: names of the layers that are watched. findings: what was found, in order.
        first_nan, first_inf: the first of each, or None. On a GPU they lag behind by the steps that it has not finished.
        rank: of this process. full: whether the step at hand is one in which scales are looked at.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 20,
        filter: Filter | None = None,
        plain: bool = True,
        stop: str | Sequence[str] | Mapping[str, float] | None = None,
        log: str | Path | None = None,
        live: bool = False,
        first_step: int = 0,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise TypeError(f"model is {type(model).__name__}; a torch.nn.Module is needed")
        self._every = checks.count("every", every)
        self._limits = _limits(stop)
        self._measured = bool(set(self._limits or ()) - {"nan", "inf"})
        self._steps = 0
        self._begin(checks.count("first_step", first_step, 0))
        self._model = weakref.ref(model)
        self._slots, self._history = Slots(), History(_COLUMNS_KEPT)
        self._latest: dict[tuple[str, str], Latest] = {}
        self._pending: deque[Snapshot] = deque()
        self._paused = self._closed = False
        self._newest: int | None = None
        self.findings: list[Finding] = []
        self.rank, ranks = _rank()
        self.layers, self._undo = attach(model, self, filter, plain)
        self._log = None if log is None else Log(ranked(log, self.rank, ranks))
        self._write("start", rank=self.rank, ranks=ranks, layers=self.layers, every=every, first_step=first_step)
        console = Console(stderr=True)
        self._live = Live(console=console, auto_refresh=False) if live and console.is_terminal else None
        if self._live is not None:
            self._live.start()

    # what layers call

    def look(self, layer: str, tensor: Seen, offsets: Tensor | None) -> None:
        """A tensor of the step at hand; not for users. Nothing of it is kept."""
        if not self._paused and not self._closed:
            self._slots.add(layer, tensor, offsets, self.full)

    def look_at_pass(self, layer: str, tensors: Sequence[Seen], offsets: Tensor) -> None:
        """Tensors each of which is made of the one before; not for users."""
        if not self._paused and not self._closed:
            self._slots.add_pass(layer, tensors, offsets, self.full)

    def _begin(self, step: int) -> None:
        self._step, self.full = step, step % self._every == 0 or self._steps == 0

    # what users call

    def step(self, number: int | None = None) -> None:
        """A step is over: forward, backward (and ``backward_dw``) of all its microbatches.

        Args:
            number: of the step that ends; None: one more than the last.

        Raises:
            WatchStop: with ``stop``. Then, on a GPU, this waits for the step.
        """
        if self._closed:
            raise RuntimeError("this watch is closed")
        if number is not None:
            self._step = checks.count("number", number, 0)
        if self._steps == 0:
            self._say_what_was_not_seen()
        self._pending.append(self._slots.take(self._step, self.full, measured=self._measured))
        self._steps += 1
        self._begin(self._step + 1)
        before = len(self.findings)
        self._drain(wait=self._limits is not None)
        stopped = [f for f in self.findings[before:] if self._limits and f.kind in self._limits]
        if stopped:
            raise WatchStop(stopped[0], self.report())

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is counted inside: validation, say."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    @property
    def first_nan(self) -> Finding | None:
        """The first NaN."""
        return next((f for f in self.findings if f.kind == "nan"), None)

    @property
    def first_inf(self) -> Finding | None:
        """The first infinity."""
        return next((f for f in self.findings if f.kind == "inf"), None)

    def report(self) -> str:
        """What was found, in words: step, layer, role, expert; parameters that are not finite now. Waits for the device."""
        self._drain(wait=True)
        return in_words(self.findings, len(self.layers), self._steps, self._newest, self._model())

    def table(self, roles: list[str] | None = None) -> Table:
        """The newest step, a row a tensor; ``print(watch.text())`` shows it."""
        self._drain(wait=True)
        return build_table(self._latest, self._newest, roles)

    def text(self, roles: list[str] | None = None, width: int = 160) -> str:
        """:meth:`table` as text."""
        console = Console(width=width, no_color=True)
        with console.capture() as captured:
            console.print(table_to_rich(self.table(roles)))
        return captured.get()

    def heatmap(self, path: str | Path, metric: str | None = None, role: str | None = None) -> Path:
        """Draw layer by step.

        Args:
            path: ``.png`` (needs the plot extra) or ``.html`` (a page with the report and the table too).
            metric: "nan", "inf", "saturated", "underflow", "amax", "spread"; None: all of them.
            role: such as "activation"; None: the worst of each layer.

        Raises:
            ValueError: another ending, an unknown metric or role. PlottingUnavailableError: a PNG without matplotlib.
        """
        self._drain(wait=True)
        path = Path(path)
        maps = [build_heatmap(self._history, m, role) for m in ([metric] if metric else METRICS)]
        if path.suffix == ".png":
            return write_heatmaps_png(path, maps)
        if path.suffix == ".html":
            return write_html(path, build_page(maps, self.report(), self.table()))
        raise ValueError(f"path={str(path)!r} ends in {path.suffix!r}; .png or .html is needed")

    def close(self) -> None:
        """Take hooks and taps off the model, and look at a step that was not ended. Reports can still be read."""
        if self._closed:
            return
        if self._slots.touched:
            self._pending.append(self._slots.take(self._step, self.full))
            self._steps += 1
        self._closed = True
        for undo in self._undo:
            undo()
        self._drain(wait=True)
        if self._live is not None:
            self._live.stop()
        self._write("end", steps=self._steps)
        if self._log is not None:
            self._log.close()
            self._log = None

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # what arrives on the host

    def _drain(self, wait: bool) -> None:
        while self._pending and (wait or self._pending[0].ready()):
            snapshot = self._pending.popleft()
            snapshot.wait()
            self._arrived(snapshot)

    def _arrived(self, snapshot: Snapshot) -> None:
        self._newest = snapshot.step
        if not snapshot.full and not self._measured and snapshot.clean():
            self._history.add_clean(snapshot.step)
            self._write("step", step=snapshot.step, rank=self.rank, full=False, tensors=[])
            return
        totals = snapshot.totals()
        measured = measure(totals, snapshot.full)
        keys = [(slot.layer, slot.role) for slot, _ in snapshot.slots]
        bad = (measured[:, :2] > 0).any(1).tolist()
        for (slot, _), key, values, wrong in zip(snapshot.slots, keys, measured.tolist(), bad, strict=True):
            rows = snapshot.rows(slot)[:, :2].sum(1) if wrong and slot.groups > 1 else None
            experts = () if rows is None else tuple(rows.nonzero()[:, 0].tolist())
            self._latest.setdefault(key, Latest()).update(snapshot.step, slot.format, experts, values)
        self._history.add(snapshot.step, snapshot.full, keys, measured)
        self._find(snapshot, totals, any(bad))
        if self._log is not None:
            shown = range(len(keys)) if snapshot.full else [i for i, wrong in enumerate(bad) if wrong]
            values = measured.tolist()
            lines = [_line(keys[i], values[i], self._latest[keys[i]].experts) for i in shown]
            self._log.write("step", step=snapshot.step, rank=self.rank, full=snapshot.full, tensors=lines)
        if self._live is not None:
            self._live.update(table_to_rich(build_table(self._latest, self._newest)), refresh=True)

    def _find(self, snapshot: Snapshot, totals: Tensor, bad: bool) -> None:
        missing = [kind for kind, known in (("nan", self.first_nan), ("inf", self.first_inf)) if bad and not known]
        found_now = [f for kind in missing if (f := find_first(snapshot, totals, kind, self.rank))]
        order = {(slot.layer, slot.role): n for n, (slot, _) in enumerate(snapshot.slots)}
        for found in sorted(found_now, key=lambda f: order[f.layer, f.role]):
            self._add(found)
        for metric, limit in (self._limits or {}).items():
            if metric not in ("nan", "inf") and not any(f.kind == metric for f in self.findings):
                past = find_past(snapshot, metric, limit, self.rank)
                if past is not None:
                    self._add(past)

    def _add(self, found: Finding) -> None:
        self.findings.append(found)
        self._write("finding", finding=to_jsonable(found), text=str(found))

    def _write(self, event: str, **values: Any) -> None:
        if self._log is not None:
            self._log.write(event, **values)

    def _say_what_was_not_seen(self) -> None:
        seen = self._slots.layers
        missing = [name for name in self.layers if name not in seen]
        if missing:
            shown = ", ".join(missing[:6]) + (" ..." if len(missing) > 6 else "")
            warnings.warn(
                f"{len(missing)} of {len(self.layers)} watched layers showed nothing in the first step: {shown}. They did not "
                "run; or they were compiled before watch() came, and hooks that come later are not part of a compiled graph: "
                "call watch() before the first compiled call, or torch._dynamo.reset() after it",
                stacklevel=3,
            )


def _limits(stop: object) -> dict[str, float] | None:
    if stop is None:
        return None
    if isinstance(stop, Mapping):
        limits = dict(stop)
    else:
        names = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, list | tuple) else [repr(stop)]
        limits = dict.fromkeys(names, 0.0)
        for name in names:
            if name in METRICS and name not in ("nan", "inf"):
                raise ValueError(f"stop={stop!r}: {name} needs a limit, stop={{{name!r}: ...}}")
    for metric, limit in limits.items():
        if metric not in METRICS:
            raise ValueError(f"stop names {metric!r}; legal: {', '.join(METRICS)}")
        if not isinstance(limit, int | float) or math.isnan(limit):
            raise TypeError(f"stop[{metric!r}]={limit!r}; a number is needed")
        if metric in ("nan", "inf") and limit != 0:
            raise ValueError(f"stop[{metric!r}]={limit!r}; 0 is the only limit: the first one stops")
    return limits


def _line(key: tuple[str, str], values: list[float], experts: tuple[int, ...]) -> dict[str, Any]:
    """What the log says of a tensor; what is not known is left out."""
    known = {name: value for name, value in zip(METRICS, values, strict=True) if value == value}
    return {"layer": key[0], "role": key[1], **known, **({"experts": list(experts)} if experts else {})}


def _rank() -> tuple[int, int]:
    """(rank, number of ranks) of this process."""
    d = torch.distributed
    return (d.get_rank(), d.get_world_size()) if d.is_available() and d.is_initialized() else (0, 1)


def watch(
    model: nn.Module,
    *,
    every: int = 20,
    filter: Filter | None = None,
    plain: bool = True,
    stop: str | Sequence[str] | Mapping[str, float] | None = None,
    log: str | Path | None = None,
    live: bool = False,
    first_step: int = 0,
) -> Watch:
    """Watch every tensor that passes through the layers of a model, forward and backward, without a wait for the device.

    Call ``.step()`` at the end of each step; :meth:`Watch.report` names the step, layer, role and expert where the first NaN
    appeared. Layers of blockscale show all their tensors (see ``blockscale.watching.ROLES``), any other module without
    children its inputs, outputs and the gradients of its outputs.

    A *full* step (the first, and each ``every``-th) looks at everything. Between them a NaN is still found in its step, from
    fewer tensors: on the CPU a pass of a blockscale layer by its last tensor, then by all of them if that is not finite;
    weights and their gradients not; a router by its scores and probabilities; other modules by the outputs of products and
    the gradients of norms and activations, which a NaN reaches. An infinity that a format saturates (NVFP4, FP8) shows in
    full steps only.

    Results do not change by a bit (under ``torch.compile``, a compiler may fuse plain modules differently around what is
    looked at). Recomputed forward passes are not counted again.

    Args:
        model: any module. One may be watched by several at once.
        every: steps from one full step to the next; scales (saturated and underflowed elements, spread) are looked at there.
        filter: layers to watch: a pattern such as "blocks.3.*", several, or a function of name and module. None: all.
        plain: watch modules that are not blockscale's too.
        stop: raise :class:`WatchStop` at the end of a step with a "nan", an "inf", either ``("nan", "inf")``, or with a tensor
            past a limit, ``{"nan": 0, "saturated": 0.01, "underflow": 0.9, "amax": 1e6, "spread": 40}`` (shares of
            elements; log2). On a GPU each step then waits for its counters.
        log: a JSON-lines file, a line a step (``blockscale.watching.read_log``); of several ranks each writes its own,
            ``watch.rank1.jsonl``.
        live: a table on stderr, redrawn each step, where that is a terminal.
        first_step: number of the first step.

    Raises:
        TypeError, ValueError: naming the argument. ValueError: ``filter`` passes no layer.
    """
    return Watch(model, every=every, filter=filter, plain=plain, stop=stop, log=log, live=live, first_step=first_step)
