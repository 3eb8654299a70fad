"""What the training tests share: a tiny job and observers."""

from __future__ import annotations

from pathlib import Path

from blockscale.train import Batches, Corpus, Job, Trainer, Transformer
from blockscale.train.model import Attention, Experts
from blockscale.train.optimizer import OptimizerConfig


def tiny_config(data: Path, recipes: tuple[str, ...], steps: int = 30, seed: int = 5) -> Job.Config:
    """Two blocks of width 32, four experts."""
    return Job.Config(
        seed=seed,
        recipes=recipes,
        device="cpu",
        data=Corpus.Config(path=str(data)),
        batches=Batches.Config(size=4, context=32, validation=2),
        model=Transformer.Config(
            width=32,
            layers=2,
            attention=Attention.Config(heads=2),
            experts=Experts.Config(num_experts=4, intermediate=32),
        ),
        training=Trainer.Config(
            steps=steps, evaluate_every=10, checkpoint_every=8, optimizer=OptimizerConfig(learning_rate=3e-3, floor=0.1)
        ),
    )


class Quiet:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []
        self.steps: list[tuple[str, int]] = []

    def started(self, choice, state, steps):
        self.steps.append((choice.name, state.step))

    def stepped(self, choice, state):
        self.steps.append((choice.name, state.step))

    def finished(self, choice, state):
        pass

    def note(self, text):
        self.notes.append(text)


def never() -> bool:
    """Do not stop."""
    return False
