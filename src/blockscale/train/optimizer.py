"""AdamW in float32 with linear warm-up, cosine decay and gradient clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class OptimizerConfig:
    """``warmup``: share of the steps that warm up; ``floor``: the last learning rate as a share of the peak."""

    learning_rate: float = 2e-3
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    warmup: float = 0.1
    floor: float = 0.0


def make_optimizer(model: torch.nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW; matrices decay, norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() >= 2]
    others = [parameter for parameter in model.parameters() if parameter.dim() < 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    betas = (config.beta1, config.beta2)
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=betas, eps=1e-8, fused=True)


def learning_rate(step: int, steps: int, config: OptimizerConfig) -> float:
    """The learning rate of ``step`` (0-based) of ``steps``.

    Example: peak 3e-3, 100 steps, warm-up 0.1, floor 0.1: step 0 -> 3e-4, step 9 -> 3e-3, step 99 -> about 3e-4.
    """
    warmup = max(1, round(steps * config.warmup))
    if step < warmup:
        return config.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, steps - warmup)
    share = config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * progress))
    return config.learning_rate * share
