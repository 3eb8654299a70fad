"""The job: the same model, weights and batches with one recipe after the other."""

from __future__ import annotations

import dataclasses
import shutil
import typing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import blockscale as bs
from blockscale.report import PlottingUnavailableError
from blockscale.train import checkpoint
from blockscale.train.data import Batches, Corpus
from blockscale.train.measure import compare, expert_gradients, weights_sha256
from blockscale.train.model import Transformer
from blockscale.train.recipes import BASELINE, CHOICES, DEFAULT
from blockscale.train.trainer import Observer, Trainer, TrainingState

ConfigType = TypeVar("ConfigType")


class JobError(ValueError):
    """The job cannot start as asked; the message says why and what would do."""


@dataclass(frozen=True)
class JobResult:
    """Everything a finished job knows. ``states`` are in the order of the recipes."""

    config: Job.Config
    corpus: Corpus
    device: torch.device
    parameters: int
    expert_parameters: int
    states: tuple[TrainingState, ...]

    def state(self, recipe: str) -> TrainingState | None:
        """The state of one recipe, None when it was not trained."""
        return next((state for state in self.states if state.recipe == recipe), None)

    def gap_percent(self, recipe: str) -> float | None:
        """How far the final validation loss is above bf16's, in percent of it; None without bf16 or for bf16 itself."""
        state, baseline = self.state(recipe), self.state(BASELINE)
        if state is None or baseline is None or recipe == BASELINE:
            return None
        if state.diverged_at is not None or baseline.diverged_at is not None:
            return float("nan")
        reference = baseline.validation[-1][1]
        return 100.0 * (state.validation[-1][1] - reference) / reference


class Job:
    """A folder ``out`` and what is trained into it. ``watch``: watch the models (``bs.watch``), into ``out/watch``."""

    @dataclass(frozen=True)
    class Config:
        """``device``: "auto" (the GPU when there is one), "cpu", "cuda", "cuda:1"..."""

        seed: int = 0
        recipes: tuple[str, ...] = DEFAULT
        device: str = "auto"
        data: Corpus.Config = field(default_factory=Corpus.Config)
        batches: Batches.Config = field(default_factory=Batches.Config)
        model: Transformer.Config = field(default_factory=Transformer.Config)
        training: Trainer.Config = field(default_factory=Trainer.Config)

    def __init__(self, config: Config, out: Path, watch: bool = False) -> None:
        self.config, self.out, self.watch = config, out, watch
        self.device = _device(config.device)
        self.corpus = Corpus.load(config.data)
        self.batches = Batches(config.batches, self.corpus, config.seed)
        self._baseline: dict[str, torch.Tensor] | None = None

    def run(self, observer: Observer, stop: Callable[[], bool]) -> JobResult:
        """Train every recipe, going on from its newest checkpoint in ``out``.

        Raises:
            Interrupted: ``stop()`` became true; everything is saved.
            JobError: the data changed since the checkpoints were written.
        """
        states = tuple(self._train(name, observer, stop) for name in self.config.recipes)
        model = self._model()
        experts = sum(parameter.numel() for name, parameter in model.named_parameters() if ".moe.experts." in name)
        total = sum(parameter.numel() for parameter in model.parameters())
        return JobResult(self.config, self.corpus, self.device, total, experts, states)

    def _train(self, name: str, observer: Observer, stop: Callable[[], bool]) -> TrainingState:
        choice, folder = CHOICES[name], recipe_folder(self.out, name)
        saved = checkpoint.newest(folder)
        described = {"config": dataclasses.asdict(self.config), "data_sha256": self.corpus.sha256}
        if saved is None:
            state, finished = self._new_state(name), False
        else:
            content = checkpoint.read_state(saved)
            if content["job"]["data_sha256"] != self.corpus.sha256:
                raise JobError(f"the data is not what {saved} was trained on; give back that data, or choose another --out")
            state, finished = TrainingState.from_json(content["training"]), content["finished"]
        if finished:
            observer.started(choice, state, self.config.training.steps)
            observer.finished(choice, state)
            return state
        trainer = Trainer(self.config.training, choice, self._model(), self.batches, state, folder)
        torch.manual_seed(self.config.seed)
        if saved is not None:
            for what, now in (("device", self.device.type), ("threads", torch.get_num_threads())):
                if getattr(state, what) != now:
                    observer.note(f"{name}: {what} was {getattr(state, what)}, is {now}: the last bits may differ")
            trainer.resume(saved)
        if self.watch:
            with watched(trainer, self.out / "watch", observer):
                trainer.run(observer, stop, described)
        else:
            trainer.run(observer, stop, described)
        return state

    def _new_state(self, name: str) -> TrainingState:
        """Step 0, with what is measured there."""
        model = self._model()
        digest = weights_sha256(model)
        if self._baseline is None:
            self._baseline = self._gradients(model, BASELINE)[0]
        gradients, saved_bytes = self._gradients(model, name)
        measurement = compare(gradients, self._baseline, saved_bytes)
        return TrainingState(name, self.device.type, torch.get_num_threads(), digest, measurement)

    def _gradients(self, model: Transformer, name: str) -> tuple[dict[str, torch.Tensor], int]:
        torch.manual_seed(self.config.seed)
        return expert_gradients(model, self.batches.training(0, self.device), CHOICES[name].make())

    def _model(self) -> Transformer:
        return Transformer(self.config.model, self.config.batches.context, self.config.seed).to(self.device)


def recipe_folder(out: Path, recipe: str) -> Path:
    """Where the checkpoints of one recipe are."""
    return out / "checkpoints" / recipe


def saved_config(out: Path) -> Job.Config | None:
    """The configuration of the run that ``out`` holds, None when it holds none.

    Raises:
        JobError: another version of blockscale wrote it.
    """
    for folder in sorted((out / "checkpoints").glob("*")):
        saved = checkpoint.newest(folder)
        if saved is not None:
            try:
                return _from_dict(Job.Config, checkpoint.read_state(saved)["job"]["config"])
            except (KeyError, TypeError) as error:
                raise JobError(f"{saved} was written by another version of blockscale ({error}); choose another --out") from error
    return None


@contextmanager
def watched(trainer: Trainer, folder: Path, observer: Observer) -> Iterator[None]:
    """Watch a trainer's model inside; however it ends, ``folder`` then holds the log, the page and the heat maps."""
    name = trainer.choice.name
    with bs.watch(trainer.model, log=folder / f"{name}.jsonl", first_step=trainer.state.step + 1) as watch:
        trainer.watch = watch
        try:
            yield
        finally:
            trainer.watch = None
            watch.close()
            watch.heatmap(folder / f"{name}.html")
            try:
                watch.heatmap(folder / f"{name}.png")
            except PlottingUnavailableError as error:
                observer.note(str(error))
            if watch.findings:
                observer.note(f"{name}: {watch.report()}")


def remove_run(out: Path) -> None:
    """Remove the checkpoints and what was watched in ``out``; files that are not this job's stay."""
    for folder in ("checkpoints", "watch"):
        shutil.rmtree(out / folder, ignore_errors=True)


def check(config: Job.Config) -> None:
    """Refuse what cannot be trained.

    Raises:
        JobError: a value is out of range; the message names it, the value and the range.
    """
    training, batches, model = config.training, config.batches, config.model
    positive = {
        "steps": training.steps,
        "evaluate every": training.evaluate_every,
        "checkpoint every": training.checkpoint_every,
        "batch": batches.size,
        "context": batches.context,
        "validation batches": batches.validation,
        "width": model.width,
        "layers": model.layers,
        "heads": model.attention.heads,
        "experts": model.experts.num_experts,
        "intermediate": model.experts.intermediate,
    }
    for name, value in positive.items():
        if value < 1:
            raise JobError(f"{name} is {value}; it must be 1 or more")
    if not 0 <= config.seed < 2**31:
        raise JobError(f"seed is {config.seed}; it must be from 0 to {2**31 - 1}")
    if not 1 <= model.experts.top_k <= model.experts.num_experts:
        raise JobError(f"top-k is {model.experts.top_k}; it must be from 1 to experts = {model.experts.num_experts}")
    if model.width % (2 * model.attention.heads):
        raise JobError(f"width is {model.width}; it must be a multiple of 2 * heads = {2 * model.attention.heads}")
    if not 0 < training.optimizer.learning_rate < 1:
        raise JobError(f"learning rate is {training.optimizer.learning_rate}; it must be above 0 and below 1")


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise JobError(f"device {name!r} is unknown; choose auto, cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise JobError(f"device {name!r} is not supported; choose auto, cpu or cuda")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise JobError(f"device {name!r} is not here: {torch.cuda.device_count()} CUDA devices; choose auto or cpu")
    return device


def _from_dict(kind: type[ConfigType], values: dict[str, Any]) -> ConfigType:
    """A (nested) configuration dataclass from what ``dataclasses.asdict`` and JSON made of it."""
    hints = typing.get_type_hints(kind)
    built = {}
    for name, value in values.items():
        if dataclasses.is_dataclass(hints[name]):
            value = _from_dict(typing.cast("type[Any]", hints[name]), value)
        built[name] = tuple(value) if isinstance(value, list) else value
    return kind(**built)
