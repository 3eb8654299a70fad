"""Training with one recipe: step, validate, checkpoint, stop, go on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

import blockscale as bs
from blockscale.train import checkpoint
from blockscale.train.data import Batches
from blockscale.train.measure import Measurement, weights_sha256
from blockscale.train.model import Transformer
from blockscale.train.optimizer import OptimizerConfig, learning_rate, make_optimizer
from blockscale.train.recipes import RecipeChoice


class Interrupted(Exception):  # noqa: N818  (not an error)
    """The job was asked to stop and has saved: ``recipe`` after ``step`` steps."""

    def __init__(self, recipe: str, step: int) -> None:
        super().__init__(f"stopped after step {step} of {recipe}")
        self.recipe, self.step = recipe, step


class Observer(Protocol):
    """What a job tells while it runs."""

    def started(self, choice: RecipeChoice, state: TrainingState, steps: int) -> None:
        """Training with ``choice`` begins, or goes on, at ``state.step``."""

    def stepped(self, choice: RecipeChoice, state: TrainingState) -> None:
        """One more step is behind."""

    def finished(self, choice: RecipeChoice, state: TrainingState) -> None:
        """All steps are behind, or the loss was not finite."""

    def note(self, text: str) -> None:
        """Something a person should know."""


@dataclass
class TrainingState:
    """What is known of one recipe's training so far; all of it is in ``state.json``.

    ``losses``: each step's training loss; ``validation``: (steps behind, loss); ``seconds``: of training steps, validation and
    checkpoints aside; ``batches_sha256``: a digest of every batch's start positions, in order; ``diverged_at``: the step whose
    loss was not finite.
    """

    recipe: str
    device: str
    threads: int
    initial_sha256: str
    measurement: Measurement
    batches_sha256: str = ""
    step: int = 0
    seconds: float = 0.0
    losses: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)
    diverged_at: int | None = None
    final_sha256: str = ""

    @classmethod
    def from_json(cls, saved: dict[str, Any]) -> TrainingState:
        """The inverse of ``dataclasses.asdict`` through JSON."""
        values = dict(saved)
        values["measurement"] = Measurement(**values["measurement"])
        values["validation"] = [(int(step), float(loss)) for step, loss in values["validation"]]
        return cls(**values)


class Trainer:
    """One recipe's model, optimizer and state. ``watch``: told of each step, counted from 1; validation is not looked at."""

    @dataclass(frozen=True)
    class Config:
        """``evaluate_every`` and ``checkpoint_every`` are in steps."""

        steps: int = 100
        evaluate_every: int = 20
        checkpoint_every: int = 25
        optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)

    def __init__(
        self,
        config: Config,
        choice: RecipeChoice,
        model: Transformer,
        batches: Batches,
        state: TrainingState,
        folder: Path,
    ) -> None:
        self.config, self.choice, self.model, self.batches, self.state, self.folder = (
            config,
            choice,
            model,
            batches,
            state,
            folder,
        )
        self.device = next(model.parameters()).device
        self.recipe = choice.make()
        self.optimizer = make_optimizer(model, config.optimizer)
        self.watch: bs.Watch | None = None

    def resume(self, saved: Path) -> None:
        """Take weights, moments and random state from a checkpoint of this recipe."""
        checkpoint.restore(saved, self.model, self.optimizer, self.device)

    def run(self, observer: Observer, stop: Callable[[], bool], job: dict[str, Any]) -> None:
        """Train to the last step. ``job`` is the configuration that goes into every checkpoint.

        Raises:
            Interrupted: ``stop()`` became true; the state is saved.
        """
        state, steps = self.state, self.config.steps
        if not state.validation:
            state.validation.append((0, self.evaluate()))
            self.save(job)
        observer.started(self.choice, state, steps)
        while state.step < steps and state.diverged_at is None:
            if stop():
                self.save(job)
                raise Interrupted(self.choice.name, state.step)
            self.train_step()
            observer.stepped(self.choice, state)
            if state.step == steps or state.step % self.config.evaluate_every == 0:
                state.validation.append((state.step, self.evaluate()))
            if state.step < steps and state.step % self.config.checkpoint_every == 0:
                self.save(job)
        state.final_sha256 = weights_sha256(self.model)
        self.save(job, finished=True)
        observer.finished(self.choice, state)

    def train_step(self) -> None:
        """Forward, backward, clip, update. A loss that is not finite leaves the weights alone and ends the training."""
        state, options = self.state, self.config.optimizer
        begun = time.perf_counter()
        inputs, targets = self.batches.training(state.step, self.device)
        with bs.autocast(self.recipe):
            loss, aux_loss = self.model.loss(inputs, targets)
        (loss + aux_loss).backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), options.clip_norm)
        value = loss.item()
        if self.watch is not None:
            self.watch.step(state.step + 1)
        if torch.isfinite(loss + norm):
            for group in self.optimizer.param_groups:
                group["lr"] = learning_rate(state.step, self.config.steps, options)
            self.optimizer.step()
        else:
            state.diverged_at = state.step
        self.optimizer.zero_grad(set_to_none=True)
        starts = self.batches.starts(state.step).numpy().tobytes()
        state.batches_sha256 = hashlib.sha256(state.batches_sha256.encode() + starts).hexdigest()
        state.losses.append(value)
        state.step += 1
        state.seconds += time.perf_counter() - begun

    @torch.no_grad()
    def evaluate(self) -> float:
        """Mean cross entropy over the fixed validation batches, in nats per byte, quantized as in training."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        with bs.autocast(self.recipe), nullcontext() if self.watch is None else self.watch.paused():
            for inputs, targets in self.batches.validation(self.device):
                total += self.model.loss(inputs, targets)[0]
        return total.item() / self.batches.config.validation

    def save(self, job: dict[str, Any], *, finished: bool = False) -> None:
        """Publish a checkpoint; a finished recipe's has no optimizer."""
        state = {"job": job, "finished": finished, "training": dataclasses.asdict(self.state)}
        files = {checkpoint.STATE: json.dumps(state).encode(), checkpoint.MODEL: checkpoint.model_bytes(self.model)}
        if not finished:
            files[checkpoint.OPTIMIZER] = checkpoint.optimizer_bytes(self.optimizer, self.device)
        checkpoint.publish(self.folder, self.state.step, files)
