"""Recipes: which tensor of a training step is quantized to what. Frozen dataclasses; None means bfloat16 operands.

A recipe has three roles. The input and the weight are quantized for the forward product (rowwise planes); the gradient
for dgrad (rowwise, against the weight's columnwise plane) and wgrad (columnwise, against the input's columnwise plane).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

from blockscale.formats import MXFP4, MXFP8, NVFP4, Format, FP8Block, FP8Delayed, FP8Tensor, Hybrid, parse

_HIGH_PRECISION = "bf16"


ROLES = ("input", "weight", "gradient")
BACKWARD = ("quantized", "high_precision", "dequantized")
#: names of the linear layers that a recipe may treat apart: those of an MLP, and one that stands alone
LINEARS = ("linear", "fc1", "fc2")


@dataclass(frozen=True)
class Recipe:
    """Formats by role.

    Args:
        input, weight, gradient: a format, or None for bfloat16 operands.
        backward: what the products of the backward pass read. "quantized": ``gradient`` and the columnwise planes.
            "high_precision": the gradient, the weight and the input as they were, rounded to bfloat16. "dequantized": the
            gradient rounded to bfloat16, with the values that the forward product saw (of the rowwise planes), rounded
            to bfloat16. ``gradient`` is None in the last two.
        linears: (name, recipe) of linears that differ from this one, names as in ``LINEARS``.
    """

    input: Format | None = None
    weight: Format | None = None
    gradient: Format | None = None
    backward: str = "quantized"
    linears: tuple[tuple[str, Recipe], ...] = ()
    _spec: ClassVar[str]

    def __post_init__(self) -> None:
        roles = {"input": self.input, "weight": self.weight, "gradient": self.gradient}
        for role, fmt in roles.items():
            if fmt is not None and not isinstance(fmt, Format):
                raise TypeError(f"{role} is {type(fmt).__name__}; a blockscale format or None is needed")
        if self.backward not in BACKWARD:
            raise ValueError(f"backward={self.backward!r} is not one of {BACKWARD}")
        if self.backward != "quantized" and self.gradient is not None:
            raise ValueError(f"gradient is a format but backward={self.backward!r} does not quantize it; leave it None")
        if self.backward == "quantized" and _transformed(self.input) != _transformed(self.gradient):
            raise ValueError("hadamard must be the same for input and gradient: the transforms cancel in wgrad")
        if _transformed(self.weight):
            raise ValueError("weight with hadamard=True is not legal: nothing in dgrad would undo the transform")
        for role in ("input", "weight"):
            if getattr(roles[role], "stochastic", False):
                raise ValueError(f"{role} with stochastic=True is not legal: only gradients are rounded stochastically")
        for name, recipe in self.linears:
            if name not in LINEARS or recipe.linears:
                raise ValueError(f"linears has {name!r}; a recipe without linears of its own for one of {LINEARS} is needed")

        # made once: torch.compile would take the numbers of a second recipe for symbolic sizes while it traced the text
        parts = [_HIGH_PRECISION if f is None else f.spec() for f in roles.values()]
        parts += [] if self.backward == "quantized" else [self.backward]
        text = "|".join(parts) + "".join(f"#{name}|{recipe.spec()}" for name, recipe in self.linears)
        object.__setattr__(self, "_spec", text)

    @property
    def name(self) -> str:
        """A short name for tables."""
        return _HIGH_PRECISION if self.input is None else self.input.kind

    def of(self, linear: str) -> Recipe:
        """The recipe of a linear layer, this one unless ``linears`` has another."""
        return dict(self.linears).get(linear, self)

    @property
    def needs_rng(self) -> bool:
        """Whether the backward pass draws random bits."""
        recipes = (self, *(recipe for _, recipe in self.linears))
        return any(getattr(recipe.gradient, "stochastic", False) for recipe in recipes)

    @property
    def saved_plane(self) -> str | None:
        """The plane of a linear's input that is kept for wgrad; None: the input itself."""
        if self.input is None or self.backward == "high_precision":
            return None
        return "columnwise" if self.backward == "quantized" else "rowwise"

    def with_backward(self, backward: str) -> Recipe:
        """The same forward pass with another ``backward`` ("high_precision" or "dequantized"), which needs no gradient format."""
        if backward == "quantized" and self.backward != backward:
            raise ValueError("backward='quantized' needs a gradient format; make the recipe anew")
        linears = tuple((name, recipe.with_backward(backward)) for name, recipe in self.linears)
        return self if backward == self.backward else Recipe(self.input, self.weight, None, backward, linears)

    def spec(self) -> str:
        """String form that operators take; :func:`parse_recipe` is the inverse."""
        return self._spec


def _transformed(fmt: Format | None) -> bool:
    return fmt is not None and bool(getattr(fmt.of("columnwise"), "hadamard", False))


@lru_cache(maxsize=64)
def parse_recipe(spec: str) -> Recipe:
    """The recipe of a string made by :meth:`Recipe.spec`: ``input|weight|gradient``, its backward and other linears if any."""
    own, *others = spec.split("#")
    linears = tuple((name, parse_recipe(text)) for name, _, text in (other.partition("|") for other in others))
    parts = own.split("|")
    if len(parts) not in (3, 4):
        raise ValueError(f"recipe {spec!r} has {len(parts)} parts; input|weight|gradient, and |backward if any, is needed")
    x, w, dy = (None if part == _HIGH_PRECISION else parse(part) for part in parts[:3])
    return Recipe(x, w, dy, parts[3] if parts[3:] else "quantized", linears)


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


def NVFP4Training(  # noqa: N802
    hadamard: bool = True, stochastic: bool = True, row_scaled: bool = False, four_over_six: str | None = None
) -> Recipe:
    """NVFP4 everywhere: 16x16 weights, Hadamard transform for wgrad, stochastic rounding of gradients.

    Args:
        hadamard: transform input and gradient along M before their columnwise quantization.
        stochastic: round gradients stochastically.
        row_scaled: inputs and gradients have a float32 scale a row of each plane; weights one a tensor (group).
        four_over_six: None, "mae" or "mse": of the weights.

    Source: "Pretraining large language models with NVFP4", NVIDIA 2025; "Four over six", Cook et al. 2025.
    """
    return Recipe(
        NVFP4(hadamard=hadamard, row_scaled=row_scaled),
        NVFP4((16, 16), four_over_six=four_over_six),
        NVFP4(hadamard=hadamard, stochastic=stochastic, row_scaled=row_scaled),
    )


def NVFP4ForwardTraining(gradient_element: str = "e4m3") -> Recipe:  # noqa: N802
    """NVFP4 for the forward product, MXFP8 for both products of the backward pass: hybrid planes of input and weight.

    Args:
        gradient_element: "e4m3" or "e5m2".
    """
    planes = Hybrid(NVFP4(), MXFP8())
    return Recipe(planes, planes, MXFP8(gradient_element))


def MXFP4Training(weight_block: tuple[int, int] = (32, 32)) -> Recipe:  # noqa: N802
    """MXFP4 everywhere.

    Args:
        weight_block: of weights, (32, 32) or (1, 32).
    """
    return Recipe(MXFP4(), MXFP4(weight_block), MXFP4())


def FP8CurrentTraining(gradient_element: str = "e5m2") -> Recipe:  # noqa: N802
    """FP8 with one scale a tensor (a group), taken from the tensor itself: E4M3 forward, E5M2 gradients by default."""
    return Recipe(FP8Tensor(), FP8Tensor(), FP8Tensor(gradient_element))


def FP8DelayedTraining(  # noqa: N802
    gradient_element: str = "e5m2", history: int = 1024, algorithm: str = "max", margin: int = 0
) -> Recipe:
    """FP8 with one scale a tensor (a group) that the steps before chose: E4M3 forward, E5M2 gradients by default.

    Layers keep scales and amax histories in their state dict. A first step runs with scale 1; each step of a torch optimizer
    makes the next scales (``bs.update_scales`` where no such optimizer has the weights). Amaxes are taken where grad is
    enabled, so that validation changes nothing; the largest of a step's microbatches counts.

    Args:
        gradient_element: "e4m3" or "e5m2".
        history: entries of a history.
        algorithm: "max" (of the history) or "most_recent".
        margin: scales are divided by 2^margin.
    """
    forward = FP8Delayed("e4m3", history, algorithm, margin)
    return Recipe(forward, forward, FP8Delayed(gradient_element, history, algorithm, margin))


def FP8BlockTraining(gradient_element: str = "e4m3") -> Recipe:  # noqa: N802
    """FP8 with 1x128 scales for activations and gradients, 128x128 for weights. Source: DeepSeek-V3 report, 2024."""
    return Recipe(FP8Block(), FP8Block(block=(128, 128)), FP8Block(gradient_element))


def W4A8Training(weight: Format | None = None, gradient_element: str = "e4m3") -> Recipe:  # noqa: N802
    """4-bit weights with MXFP8 activations and gradients.

    Args:
        weight: MXFP4 or NVFP4; None: ``MXFP4(block=(32, 32))``, whose two planes hold the same values.
        gradient_element: "e4m3" or "e5m2".
    """
    weight = MXFP4(block=(32, 32)) if weight is None else weight
    if not isinstance(weight, (MXFP4, NVFP4)):
        raise TypeError(f"weight is {type(weight).__name__}; MXFP4 or NVFP4 is needed")
    return Recipe(MXFP8(), weight, MXFP8(gradient_element))


def CustomTraining(  # noqa: N802
    choose: Callable[[str, str], Format | None], backward: str = "quantized"
) -> Recipe:
    """A recipe from a function of role and linear, asked once for each pair as the recipe is made.

    Args:
        choose: ``choose(role, linear)`` with role "input", "weight" or "gradient" and linear "fc1" or "fc2" of an MLP, or
            "linear" of a GroupedLinear that stands alone; returns a format, or None for bfloat16.
        backward: as in :class:`Recipe`; "gradient" is not asked for unless it is "quantized".

    Example: ``CustomTraining(lambda role, linear: None if linear == "fc2" else MXFP8())`` leaves the second linear bfloat16.
    """
    made: dict[str, Recipe] = {}
    for linear in LINEARS:
        gradient = choose("gradient", linear) if backward == "quantized" else None
        made[linear] = Recipe(choose("input", linear), choose("weight", linear), gradient, backward)
    alone = made.pop("linear")
    others = tuple((name, recipe) for name, recipe in made.items() if recipe != alone)
    return Recipe(alone.input, alone.weight, alone.gradient, backward, others)


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
