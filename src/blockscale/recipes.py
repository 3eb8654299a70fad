"""Recipes: which tensor of a training step is quantized to what. Frozen dataclasses; None means bfloat16 operands.

A recipe has three roles. The input and the weight are quantized for the forward product (rowwise planes); the gradient
for dgrad (rowwise, against the weight's columnwise plane) and wgrad (columnwise, against the input's columnwise plane).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from blockscale.formats import MXFP8, NVFP4, Format, FP8Block, FP8Tensor, parse

_HIGH_PRECISION = "bf16"


@dataclass(frozen=True)
class Recipe:
    """Formats by role.

    Args:
        input, weight, gradient: a format, or None for bfloat16 operands. Either all three are given or none.
    """

    input: Format | None = None
    weight: Format | None = None
    gradient: Format | None = None
    _spec: ClassVar[str]

    def __post_init__(self) -> None:
        roles = {"input": self.input, "weight": self.weight, "gradient": self.gradient}
        for role, fmt in roles.items():
            if fmt is not None and not isinstance(fmt, Format):
                raise TypeError(f"{role} is {type(fmt).__name__}; a blockscale format or None is needed")
        if len({fmt is None for fmt in roles.values()}) > 1:
            raise ValueError(f"recipe {roles}: input, weight and gradient are all formats or all None")
        if getattr(self.input, "hadamard", False) != getattr(self.gradient, "hadamard", False):
            raise ValueError("hadamard must be the same for input and gradient: the transforms cancel in wgrad")
        for role in ("input", "weight"):
            if getattr(roles[role], "stochastic", False):
                raise ValueError(f"{role} with stochastic=True is not legal: only gradients are rounded stochastically")

        # made once: torch.compile would take the numbers of a second recipe for symbolic sizes while it traced the text
        parts = (_HIGH_PRECISION if f is None else f.spec() for f in roles.values())
        object.__setattr__(self, "_spec", "|".join(parts))

    @property
    def name(self) -> str:
        """A short name for tables."""
        return _HIGH_PRECISION if self.input is None else self.input.kind

    @property
    def needs_rng(self) -> bool:
        """Whether the backward pass draws random bits."""
        return bool(getattr(self.gradient, "stochastic", False))

    def spec(self) -> str:
        """String form that operators take; :func:`parse_recipe` is the inverse."""
        return self._spec


@lru_cache(maxsize=64)
def parse_recipe(spec: str) -> Recipe:
    """The recipe of a string made by :meth:`Recipe.spec`."""
    roles = [None if part == _HIGH_PRECISION else parse(part) for part in spec.split("|")]
    if len(roles) != 3:
        raise ValueError(f"recipe {spec!r} has {len(roles)} parts; input|weight|gradient is needed")
    return Recipe(*roles)


def BF16() -> Recipe:  # noqa: N802  (named like the others)
    """High precision: operands rounded to bfloat16, float32 accumulation."""
    return Recipe()


def MXFP8Training(  # noqa: N802
    gradient_element: str = "e4m3", weight_block: tuple[int, int] = (1, 32), scale_rounding: str = "up"
) -> Recipe:
    """MXFP8 everywhere.

    Args:
        gradient_element: "e4m3", or "e5m2" for hybrid.
        weight_block: (1, 32), or (32, 32): both planes of a weight then hold the same values.
        scale_rounding: "up" or "floor".
    """
    return Recipe(
        MXFP8(scale_rounding=scale_rounding),
        MXFP8(block=weight_block, scale_rounding=scale_rounding),
        MXFP8(gradient_element, scale_rounding=scale_rounding),
    )


def NVFP4Training(hadamard: bool = True, stochastic: bool = True) -> Recipe:  # noqa: N802
    """NVFP4 everywhere: 16x16 weights, Hadamard transform for wgrad, stochastic rounding of gradients.

    Source: "Pretraining large language models with NVFP4", NVIDIA 2025.
    """
    return Recipe(NVFP4(hadamard=hadamard), NVFP4((16, 16)), NVFP4(hadamard=hadamard, stochastic=stochastic))


def FP8CurrentTraining(gradient_element: str = "e5m2") -> Recipe:  # noqa: N802
    """FP8 with one scale a tensor (a group), taken from the tensor itself: E4M3 forward, E5M2 gradients by default."""
    return Recipe(FP8Tensor(), FP8Tensor(), FP8Tensor(gradient_element))


def FP8BlockTraining(gradient_element: str = "e4m3") -> Recipe:  # noqa: N802
    """FP8 with 1x128 scales for activations and gradients, 128x128 for weights. Source: DeepSeek-V3 report, 2024."""
    return Recipe(FP8Block(), FP8Block(block=(128, 128)), FP8Block(gradient_element))


def check_recipe(recipe: object) -> Recipe:
    """``recipe``, or ``TypeError`` when it is none."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"recipe is {type(recipe).__name__}; a blockscale Recipe such as MXFP8Training() is needed")
    return recipe


class _Active(threading.local):
    """The recipes of the enclosing autocasts, innermost last."""

    def __init__(self) -> None:
        self.recipes: list[Recipe] = []


_active = _Active()


class autocast:
    """Modules without a recipe of their own use ``recipe`` inside the ``with``; backward uses the forward's recipe.

    Each thread has its own stack. Activation recomputation by ``torch.utils.checkpoint`` runs forward again during
    backward, outside the ``with`` that was there: give the layers their ``recipe=`` then, or call backward inside.

    Raises:
        TypeError: recipe is not a Recipe.
    """

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = check_recipe(recipe)

    def __enter__(self) -> None:
        _active.recipes.append(self.recipe)

    def __exit__(self, *exception: object) -> None:
        _active.recipes.pop()


def current_recipe(own: Recipe | None) -> Recipe:
    """A module's own recipe, else the innermost autocast's, else BF16."""
    if own is not None:
        return check_recipe(own)
    return _active.recipes[-1] if _active.recipes else _DEFAULT


_DEFAULT = Recipe()
