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


def _mxfp8_bf16() -> bs.recipes.Recipe:
    return bs.recipes.MXFP8Training().with_backward("high_precision")


CHOICES = {
    choice.name: choice
    for choice in (
        RecipeChoice("bf16", "bf16", bs.recipes.BF16, None),
        RecipeChoice("mxfp8", "MXFP8", bs.recipes.MXFP8Training, 1.0),
        RecipeChoice("nvfp4", "NVFP4", bs.recipes.NVFP4Training, 4.0),
        RecipeChoice("fp8block", "FP8 block", bs.recipes.FP8BlockTraining, 1.0),
        RecipeChoice("fp8current", "FP8 per tensor", bs.recipes.FP8CurrentTraining, 1.0),
        RecipeChoice("fp8delayed", "FP8 delayed", bs.recipes.FP8DelayedTraining, 1.0),
        RecipeChoice("mxfp8hybrid", "MXFP8, E5M2 gradients", lambda: bs.recipes.MXFP8Training("e5m2"), 1.0),
        RecipeChoice("mxfp8bf16", "MXFP8 forward, bf16 backward", _mxfp8_bf16, 1.0),
        RecipeChoice("nvfp4rows", "NVFP4 row-scaled", lambda: bs.recipes.NVFP4Training(row_scaled=True), 4.0),
        RecipeChoice("nvfp4fouroversix", "NVFP4 four over six", lambda: bs.recipes.NVFP4Training(four_over_six="mae"), 4.0),
        RecipeChoice("mxfp4", "MXFP4", bs.recipes.MXFP4Training, 4.0),
        RecipeChoice("w4a8", "MXFP4 weights, MXFP8", bs.recipes.W4A8Training, 4.0),
        RecipeChoice("w4a8nvfp4", "NVFP4 weights, MXFP8", lambda: bs.recipes.W4A8Training(bs.NVFP4((16, 16))), 4.0),
        RecipeChoice("planes", "NVFP4 forward, MXFP8 backward", bs.recipes.NVFP4ForwardTraining, 4.0),
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
