"""The training job: one small language model, trained with each recipe on the same batches, and compared with bf16."""

from blockscale.train.checkpoint import CheckpointError
from blockscale.train.data import Batches, Corpus, DataError
from blockscale.train.job import Job, JobError, JobResult, check, remove_run, saved_config
from blockscale.train.measure import SAVED_BYTES_METHOD, Measurement
from blockscale.train.model import Transformer
from blockscale.train.recipes import BASELINE, CHOICES, DEFAULT, RecipeChoice, parse_recipes
from blockscale.train.trainer import Interrupted, Observer, Trainer, TrainingState

__all__ = [
    "BASELINE",
    "CHOICES",
    "DEFAULT",
    "SAVED_BYTES_METHOD",
    "Batches",
    "CheckpointError",
    "Corpus",
    "DataError",
    "Interrupted",
    "Job",
    "JobError",
    "JobResult",
    "Measurement",
    "Observer",
    "RecipeChoice",
    "Trainer",
    "TrainingState",
    "Transformer",
    "check",
    "parse_recipes",
    "remove_run",
    "saved_config",
]
