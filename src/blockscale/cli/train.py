"""``blockscale train``: one small MoE language model with every recipe, compared with bf16."""

from __future__ import annotations

import dataclasses
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.console import Console

from blockscale.cli._shared import FINDINGS, INTERRUPTED, consoles, print_json, wrong_use
from blockscale.cli._train_report import build_report, build_results, verdicts
from blockscale.report import (
    PlottingUnavailableError,
    Progress,
    Report,
    make_progress,
    print_report,
    write_html,
    write_json,
    write_png,
)
from blockscale.train import (
    CheckpointError,
    DataError,
    Interrupted,
    Job,
    JobError,
    JobResult,
    RecipeChoice,
    TrainingState,
    check,
    parse_recipes,
    remove_run,
    saved_config,
)

DEFAULTS = Job.Config()
_MODEL = "Model and batches"


def _option(default: object, text: str, *names: str, panel: str | None = None) -> Any:
    return typer.Option(*names, help=f"{text} (default: {default})", show_default=False, rich_help_panel=panel)


def train(
    data: Annotated[
        str | None,
        _option("the Python standard library's sources", "Text to learn: a file, or a folder read whole.", "--data"),
    ] = None,
    recipe: Annotated[
        str | None,
        _option(
            ",".join(DEFAULTS.recipes),
            "Recipes, separated by commas: bf16, mxfp8, nvfp4, fp8block, fp8current.",
            "--recipe",
        ),
    ] = None,
    steps: Annotated[int | None, _option(DEFAULTS.training.steps, "Training steps of each recipe.", "--steps")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for checkpoints, tables, curves and report.")] = Path("runs/train"),
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with the run in --out, with its own settings, from its newest checkpoints."),
    ] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Discard the run that --out holds and start anew.")] = False,
    seed: Annotated[
        int | None,
        _option(DEFAULTS.seed, "Seed of the initial weights, the batches and stochastic rounding.", "--seed"),
    ] = None,
    device: Annotated[str | None, _option("auto", "auto (the GPU when there is one), cpu, cuda.", "--device")] = None,
    watch: Annotated[
        bool,
        typer.Option("--watch", help="Watch every layer: a log, a page and heat maps of each recipe in --out/watch."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print results.json on stdout instead of tables.")] = False,
    batch: Annotated[int | None, _option(DEFAULTS.batches.size, "Windows in a batch.", "--batch", panel=_MODEL)] = None,
    context: Annotated[int | None, _option(DEFAULTS.batches.context, "Bytes in a window.", "--context", panel=_MODEL)] = None,
    layers: Annotated[int | None, _option(DEFAULTS.model.layers, "Transformer blocks.", "--layers", panel=_MODEL)] = None,
    width: Annotated[int | None, _option(DEFAULTS.model.width, "Model width.", "--width", panel=_MODEL)] = None,
    experts: Annotated[
        int | None, _option(DEFAULTS.model.experts.num_experts, "Experts in a block.", "--experts", panel=_MODEL)
    ] = None,
    top_k: Annotated[
        int | None, _option(DEFAULTS.model.experts.top_k, "Experts a byte is sent to.", "--top-k", panel=_MODEL)
    ] = None,
    intermediate: Annotated[
        int | None,
        _option(DEFAULTS.model.experts.intermediate, "Width inside an expert.", "--intermediate", panel=_MODEL),
    ] = None,
    learning_rate: Annotated[
        float | None,
        _option(DEFAULTS.training.optimizer.learning_rate, "Peak learning rate of AdamW.", "--learning-rate", panel=_MODEL),
    ] = None,
    evaluate_every: Annotated[
        int | None, _option(DEFAULTS.training.evaluate_every, "Steps between validations.", "--evaluate-every")
    ] = None,
    checkpoint_every: Annotated[
        int | None, _option(DEFAULTS.training.checkpoint_every, "Steps between checkpoints.", "--checkpoint-every")
    ] = None,
    log_every: Annotated[
        int | None,
        _option("a tenth of the steps", "Steps between progress lines when there is no terminal.", "--log-every"),
    ] = None,
) -> None:
    """Train a small byte-level MoE language model with each recipe and compare it with bf16.

    Every recipe starts from the same weights and sees the same batches; only the experts' matrix products differ. Ends with a
    table, results.json, curves.png and report.html in --out. Ctrl-C saves; --resume goes on to the same bits.

    Exit status: 0 all recipes end as close to bf16 as they must; 1 one does not, or diverged; 2 wrong use; 130 stopped.
    """
    results_console, console = consoles()
    asked: dict[str, Any] = {
        "data.path": data,
        "training.steps": steps,
        "seed": seed,
        "device": device,
        "batches.size": batch,
        "batches.context": context,
        "model.layers": layers,
        "model.width": width,
        "model.experts.num_experts": experts,
        "model.experts.top_k": top_k,
        "model.experts.intermediate": intermediate,
        "training.optimizer.learning_rate": learning_rate,
        "training.evaluate_every": evaluate_every,
        "training.checkpoint_every": checkpoint_every,
    }
    if log_every is not None and log_every < 1:
        wrong_use(f"--log-every is {log_every}; it must be 1 or more")
    try:
        asked["recipes"] = None if recipe is None else parse_recipes(recipe)
        config = _settle(asked, out, resume=resume, overwrite=overwrite)
        job = Job(config, out, watch=watch)
        if overwrite:
            remove_run(out)
        progress = make_progress(console, log_every or max(1, config.training.steps // 10))
        with progress, _stop_on_signal() as stop:
            result = job.run(_Watcher(progress, config), stop.asked)
    except (JobError, DataError, CheckpointError, ValueError) as error:
        wrong_use(str(error))
    except OSError as error:
        wrong_use(f"--out {out} cannot be written: {error.strerror or error}")
    except Interrupted as stopped:
        console.print(f"Stopped after step {stopped.step} of {stopped.recipe}; everything is saved in {out}.", soft_wrap=True)
        console.print(f"Go on with: blockscale train --resume --out {out}", soft_wrap=True, highlight=False)
        raise typer.Exit(INTERRUPTED) from None
    except KeyboardInterrupt:
        kept = saved_config(out) is not None
        console.print(f"Stopped at once; {'the last checkpoint is intact' if kept else 'nothing was saved yet'}.")
        raise typer.Exit(INTERRUPTED) from None
    results, report = build_results(result), build_report(result)
    try:
        written = _write(out, results, report, console)
    except OSError as error:
        wrong_use(f"--out {out} cannot be written: {error.strerror or error}")
    if as_json:
        print_json(results)
    else:
        print_report(results_console, report)
        watched = ", watch/" if watch else ""
        results_console.print(f"Written to {out}: {', '.join(written)}{watched}", soft_wrap=True, highlight=False)
    if _findings(result):
        raise typer.Exit(FINDINGS)


def _settle(asked: dict[str, Any], out: Path, *, resume: bool, overwrite: bool) -> Job.Config:
    """The configuration: that of the run in ``out`` when resuming, else the defaults, with what was asked for.

    Raises:
        JobError: ``out`` holds a run and neither flag is given, or holds none to resume, or was run with other settings.
    """
    if resume and overwrite:
        raise JobError("--resume goes on with the run in --out and --overwrite discards it; give one of them")
    if out.exists() and not out.is_dir():
        raise JobError(f"--out {out} is a file; name a folder")
    saved = None if overwrite else saved_config(out)
    if resume and saved is None:
        raise JobError(f"--out {out} holds no run to resume; leave --resume out to start one")
    if saved is not None and not resume:
        raise JobError(
            f"--out {out} holds a run already: --resume goes on with it, --overwrite discards it, or name another folder"
        )
    given = {name: value for name, value in asked.items() if value is not None}
    config = saved or DEFAULTS
    for name, value in given.items():
        before = _get(config, name)
        if saved is not None and value != before:
            raise JobError(
                f"{_flag(name)} {_shown(value)} differs from the run in {out}, which has {_shown(before)}; "
                f"leave it out to go on with that run, or name another --out"
            )
        config = _replace(config, name.split("."), value)
    check(config)
    return config


def _shown(value: Any) -> str:
    if value is None:
        return "the default"
    return ",".join(value) if isinstance(value, tuple) else str(value)


def _flag(name: str) -> str:
    renamed = {
        "data.path": "data",
        "recipes": "recipe",
        "batches.size": "batch",
        "model.experts.num_experts": "experts",
    }
    return "--" + renamed.get(name, name.rsplit(".", 1)[-1]).replace("_", "-")


def _get(config: Any, name: str) -> Any:
    for part in name.split("."):
        config = getattr(config, part)
    return config


def _replace(config: Any, parts: list[str], value: Any) -> Any:
    """``config`` with the field at the end of the path ``parts`` replaced."""
    if len(parts) > 1:
        value = _replace(getattr(config, parts[0]), parts[1:], value)
    return dataclasses.replace(config, **{parts[0]: value})


class _StopRequest:
    """Set by the first signal; the second one ends the process at once."""

    def __init__(self) -> None:
        self.requested = False

    def asked(self) -> bool:
        return self.requested


@contextmanager
def _stop_on_signal() -> Iterator[_StopRequest]:
    """The first SIGINT or SIGTERM asks to stop after the step at hand; a second SIGINT raises KeyboardInterrupt."""
    request = _StopRequest()

    def handle(_number: int, _frame: FrameType | None) -> None:
        request.requested = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        # not by rich: the handler may have interrupted it in the middle of a write
        os.write(2, b"\nStopping after this step to save; Ctrl-C again stops at once.\n")

    before = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class _Watcher:
    """Shows a job's progress."""

    def __init__(self, progress: Progress, config: Job.Config) -> None:
        self._progress = progress
        self._tokens = config.batches.size * config.batches.context
        self._seconds_before = 0.0
        self._first = 0

    def started(self, choice: RecipeChoice, state: TrainingState, steps: int) -> None:
        self._first, self._seconds_before = state.step, state.seconds
        self._progress.start(choice.label, steps, state.step)

    def stepped(self, choice: RecipeChoice, state: TrainingState) -> None:
        seconds = state.seconds - self._seconds_before
        speed = (state.step - self._first) * self._tokens / max(seconds, 1e-9)
        self._progress.update(state.step, loss=f"{state.losses[-1]:.4f}", speed=f"{speed:,.0f} tokens/s")

    def finished(self, choice: RecipeChoice, state: TrainingState) -> None:
        if state.diverged_at is not None:
            self._progress.finish(f"the loss of step {state.diverged_at + 1} is not finite; this recipe ends here")
        else:
            self._progress.finish(f"validation loss {state.validation[-1][1]:.4f}")

    def note(self, text: str) -> None:
        self._progress.note(text)


def _write(out: Path, results: dict[str, Any], report: Report, console: Console) -> list[str]:
    written = [write_json(out / "results.json", results).name]
    for figure in report.figures():
        try:
            written.append(write_png(out / f"{figure.name}.png", figure).name)
        except PlottingUnavailableError as error:
            console.print(str(error), soft_wrap=True, highlight=False, markup=False)
    written.append(write_html(out / "report.html", report).name)
    return written


def _findings(result: JobResult) -> bool:
    return any(state.diverged_at is not None for state in result.states) or any(not item.holds for item in verdicts(result))
