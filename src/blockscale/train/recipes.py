"""The recipes the job trains with, by the names of ``--recipe``, and how close to bf16 each must end."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import blockscale as bs

BASELINE = "bf16"


@dataclass(frozen=True)
class RecipeChoice:
    """``bound_percent``: the largest distance of the final validation loss from bf16's that the job calls good."""

    name: str
    label: str
    make: Callable[[], bs.recipes.Recipe]
    bound_percent: float | None


CHOICES = {
    choice.name: choice
    for choice in (
        RecipeChoice("bf16", "bf16", bs.recipes.BF16, None),
        RecipeChoice("mxfp8", "MXFP8", bs.recipes.MXFP8Training, 1.0),
        RecipeChoice("nvfp4", "NVFP4", bs.recipes.NVFP4Training, 4.0),
        RecipeChoice("fp8block", "FP8 block", bs.recipes.FP8BlockTraining, 1.0),
        RecipeChoice("fp8current", "FP8 per tensor", bs.recipes.FP8CurrentTraining, 1.0),
    )
}
DEFAULT = ("bf16", "mxfp8", "nvfp4", "fp8block")


def parse_recipes(text: str) -> tuple[str, ...]:
    """``"bf16,mxfp8"`` as names, in the order given.

    Raises:
        ValueError: an unknown name, a name given twice, or no name at all.
    """
    names = tuple(part.strip().lower() for part in text.split(",") if part.strip())
    legal = ", ".join(CHOICES)
    if not names:
        raise ValueError(f"recipe {text!r} names none; choose from {legal}, separated by commas")
    for name in names:
        if name not in CHOICES:
            raise ValueError(f"unknown recipe {name!r}; choose from {legal}, separated by commas")
        if names.count(name) > 1:
            raise ValueError(f"recipe {name!r} is named twice in {text!r}")
    return names
