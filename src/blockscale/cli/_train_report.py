"""What ``blockscale train`` reports: results.json, and the tables, verdicts and curves of report.html."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from blockscale.report import (
    Column,
    Facts,
    Figure,
    Panel,
    Report,
    Section,
    Series,
    Table,
    Verdict,
    Verdicts,
    describe_environment,
)
from blockscale.report import text as show
from blockscale.train import BASELINE, CHOICES, SAVED_BYTES_METHOD, JobResult, TrainingState

RESULTS_VERSION = 1
_COLUMNS = (
    Column("label", "recipe", align="left"),
    Column("training_loss", "training loss", show.fixed(4)),
    Column("validation_loss", "validation loss", show.fixed(4)),
    Column("gap_percent", "gap to bf16", show.percent(2, signed=True)),
    Column("gradient_error", "weight-gradient error", show.fixed(4)),
    Column("seconds", "time", show.duration),
    Column("tokens_per_second", "tokens/s", show.count),
    Column("saved_bytes", "saved for backward", show.byte_count),
)


def training_loss(state: TrainingState) -> float:
    """Mean of the last tenth of the training losses (at least one)."""
    tail = state.losses[-max(1, len(state.losses) // 10) :]
    return sum(tail) / len(tail)


def verdicts(result: JobResult) -> list[Verdict]:
    """One for each recipe that must end near bf16; none without a bf16 run."""
    found = []
    for state in result.states:
        choice, gap = CHOICES[state.recipe], result.gap_percent(state.recipe)
        if gap is None or choice.bound_percent is None:
            continue
        claim = f"{choice.label} within {choice.bound_percent:g} % of bf16"
        detail = f"{gap:+.2f} %" if math.isfinite(gap) else "diverged"
        found.append(Verdict(claim, abs(gap) <= choice.bound_percent, detail))
    return found


def build_results(result: JobResult) -> dict[str, Any]:
    """The machine-readable results: everything the report shows and every loss."""
    return {
        "version": RESULTS_VERSION,
        "recipes": {state.recipe: _numbers(result, state) for state in result.states},
        "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts(result)],
        "data": {
            "source": result.corpus.source,
            "files": result.corpus.files,
            "bytes": _data_bytes(result),
            "validation_bytes": result.corpus.validation.numel(),
            "split": result.corpus.split,
            "sha256": result.corpus.sha256,
        },
        "parameters": {"total": result.parameters, "experts": result.expert_parameters},
        "config": dataclasses.asdict(result.config),
        "environment": describe_environment(result.device),
        "methods": {
            "gradient_error": "relative Frobenius error of the expert weight gradients against bf16, one batch, initial weights",
            "saved_bytes": SAVED_BYTES_METHOD,
            "training_loss": "mean of the last tenth of the steps, nats per byte",
            "validation_loss": "mean over the same fixed windows for every recipe, nats per byte, quantized as in training",
            "seconds": "training steps alone; validation and checkpoints aside",
        },
    }


def build_report(result: JobResult) -> Report:
    """The report for people."""
    found = verdicts(result)
    good = sum(verdict.holds for verdict in found)
    names = ", ".join(CHOICES[state.recipe].label for state in result.states)
    lead = (
        f"{good} of {len(found)} low-precision recipes end as close to bf16 as they must."
        if found
        else f"Trained with {names}; nothing to compare."
    )
    table = Table("", _COLUMNS, [_row(result, state) for state in result.states], note=_note(result))
    summary: list[Verdicts | Table] = [table, Verdicts(found)] if found else [table]
    return Report(
        title="Training a mixture of experts in block-scaled formats",
        lead=lead,
        sections=(
            Section("Result", summary),
            Section("Curves", [_figure(result)]),
            Section("Weight-gradient error by matrix", [_gradient_table(result)], detail=True),
            Section("What was trained", [Facts(_configuration(result))]),
            Section("Recipes", [_recipe_table(result)], detail=True),
            Section("Data", [Facts(_data(result))]),
            Section("Environment", [Facts(describe_environment(result.device))]),
        ),
    )


def _numbers(result: JobResult, state: TrainingState) -> dict[str, Any]:
    tokens = state.step * result.config.batches.size * result.config.batches.context
    return {
        "label": CHOICES[state.recipe].label,
        "training_loss": training_loss(state),
        "validation_loss": state.validation[-1][1],
        "gap_percent": result.gap_percent(state.recipe),
        "bound_percent": CHOICES[state.recipe].bound_percent,
        "gradient_error": state.measurement.gradient_error,
        "gradient_errors": state.measurement.gradient_errors,
        "saved_bytes": state.measurement.saved_bytes,
        "steps": state.step,
        "seconds": state.seconds,
        "tokens_per_second": tokens / state.seconds if state.seconds else None,
        "diverged_at": state.diverged_at,
        "initial_weights_sha256": state.initial_sha256,
        "final_weights_sha256": state.final_sha256,
        "batches_sha256": state.batches_sha256,
        "losses": state.losses,
        "validation": [list(point) for point in state.validation],
    }


def _row(result: JobResult, state: TrainingState) -> dict[str, Any]:
    numbers = _numbers(result, state)
    if state.recipe == BASELINE:
        numbers["gradient_error"] = None
    return {column.key: numbers[column.key] for column in _COLUMNS}


def _note(result: JobResult) -> str:
    config = result.config
    slower = " On a CPU quantizing costs time that only a GPU's matrix units win back: expect less speed than bf16."
    return (
        f"Losses in nats per byte. {config.training.steps} steps of {config.batches.size} x {config.batches.context} bytes. "
        f"Gradient error and saved bytes: one batch, initial weights.{slower if result.device.type == 'cpu' else ''}"
    )


def _figure(result: JobResult) -> Figure:
    losses: list[Series] = []
    gaps: list[Series] = []
    baseline = result.state(BASELINE)
    for state in result.states:
        color, label = list(CHOICES).index(state.recipe), CHOICES[state.recipe].label
        steps = [step + 1 for step in range(len(state.losses))]
        losses.append(Series(label, steps, state.losses, color, "faint"))
        losses.append(Series(label, steps, _smooth(state.losses), color, "line"))
        losses.append(Series(label, [step for step, _ in state.validation], [loss for _, loss in state.validation], color, "dots"))
        if baseline is not None and state is not baseline:
            paired = [
                (step, 100 * (loss - reference) / reference)
                for (step, loss), (_, reference) in zip(state.validation, baseline.validation, strict=False)
                if step
            ]
            gaps.append(Series(label, [step for step, _ in paired], [gap for _, gap in paired], color, "points"))
    panels = [Panel("Loss: training smoothed, validation dotted", "step", "nats per byte", losses)]
    if gaps:
        bounds = sorted({bound for state in result.states if (bound := CHOICES[state.recipe].bound_percent) is not None})
        lines = [("", 0.0), *((_bound_label(bound, result.config.recipes), bound) for bound in bounds)]
        panels.append(Panel("Validation loss above bf16's", "step", "percent", gaps, bounds=lines))
    return Figure(
        name="curves",
        title="Loss by step",
        panels=panels,
        caption="Left: every step's training loss (faint), its running mean (line) and validation (dots). "
        "Right: validation loss relative to bf16's at the same step; dashed, what each recipe must end within.",
    )


def _bound_label(bound: float, recipes: tuple[str, ...]) -> str:
    """``"1 %: MXFP8, FP8 block"``."""
    return f"{bound:g} %: " + ", ".join(CHOICES[name].label for name in recipes if CHOICES[name].bound_percent == bound)


def _smooth(losses: list[float], share: float = 0.08) -> list[float]:
    """Centred running mean over about ``share`` of the steps; the window shrinks towards both ends."""
    reach = max(1, round(len(losses) * share / 2))
    smoothed = []
    for index in range(len(losses)):
        near = min(reach, index, len(losses) - 1 - index)
        window = losses[index - near : index + near + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed


def _gradient_table(result: JobResult) -> Table:
    compared = [state for state in result.states if state.recipe != BASELINE]
    columns = [Column("name", "matrix", align="left")]
    columns += [Column(state.recipe, CHOICES[state.recipe].label, show.fixed(4)) for state in compared]
    names = list(result.states[0].measurement.gradient_errors)
    rows: list[dict[str, Any]] = [
        {"name": name, **{state.recipe: state.measurement.gradient_errors[name] for state in compared}} for name in names
    ]
    note = (
        "Relative Frobenius error against bf16's gradient of the same batch and weights. "
        "Later blocks inherit what earlier ones change, routing included."
    )
    return Table("", columns, rows, note=note)


def _recipe_table(result: JobResult) -> Table:
    """The format of each role, in the form that the operators take."""
    columns = [Column("label", "recipe", align="left")]
    columns += [Column(role, role, align="left") for role in ("input", "weight", "gradient")]
    rows = []
    for name in result.config.recipes:
        recipe = CHOICES[name].make()
        roles = {"input": recipe.input, "weight": recipe.weight, "gradient": recipe.gradient}
        shown = {role: "bfloat16" if fmt is None else fmt.spec() for role, fmt in roles.items()}
        rows.append({"label": CHOICES[name].label, **shown})
    return Table("", columns, rows)


def _configuration(result: JobResult) -> dict[str, str]:
    config, experts, optimizer = result.config, result.config.model.experts, result.config.training.optimizer
    return {
        "model": f"byte-level transformer, {config.model.layers} blocks of width {config.model.width}, "
        f"{config.model.attention.heads} heads, context {config.batches.context}",
        "experts": f"top {experts.top_k} of {experts.num_experts}, width {experts.intermediate}, {experts.activation}, "
        f"auxiliary loss {experts.aux_loss_coef:g}",
        "parameters": f"{result.parameters:,} in all, {result.expert_parameters:,} in experts",
        "precision": "parameters, AdamW, attention, norms, embedding, router and head float32; the experts' input bfloat16; "
        "the experts' matrix products by the recipe",
        "optimizer": f"AdamW, peak learning rate {optimizer.learning_rate:g}, betas {optimizer.beta1:g} and {optimizer.beta2:g}, "
        f"weight decay {optimizer.weight_decay:g}, clipped at norm {optimizer.clip_norm:g}, "
        f"{optimizer.warmup:.0%} warm-up, cosine to {optimizer.floor:.0%}",
        "steps": f"{config.training.steps} of {config.batches.size} windows: "
        f"{config.training.steps * config.batches.size * config.batches.context:,} bytes",
        "validation": f"{config.batches.validation} batches, the same every {config.training.evaluate_every} steps",
        "seed": str(config.seed),
    }


def _data_bytes(result: JobResult) -> int:
    return result.corpus.training.numel() + result.corpus.validation.numel()


def _data(result: JobResult) -> dict[str, str]:
    corpus = result.corpus
    return {
        "source": corpus.source,
        "size": f"{_data_bytes(result):,} bytes in {corpus.files:,} files",
        "held out for validation": f"{corpus.split}: {corpus.validation.numel():,} bytes",
        "sha256": corpus.sha256,
    }
