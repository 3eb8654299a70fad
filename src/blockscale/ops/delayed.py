"""Delayed scaling as the operators take it: scales and amax histories of the linears of a layer. Legend: G groups, L entries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.formats import FP8Delayed
from blockscale.ops import checks
from blockscale.recipes import ROLES, Recipe
from blockscale.reference import delayed as reference


@dataclass(frozen=True)
class RoleScaling:
    """What one tensor's delayed scaling keeps between steps: ``scale`` float32 (G,), ``amax_history`` float32 (L, G)."""

    scale: Tensor
    amax_history: Tensor


@dataclass(frozen=True)
class Scaling:
    """That of one linear, for the roles whose format is ``FP8Delayed``; the operators write amaxes to slot 0."""

    input: RoleScaling | None = None
    weight: RoleScaling | None = None
    gradient: RoleScaling | None = None


Linear = tuple[Recipe, "Scaling | None"]


def delayed_roles(r: Recipe) -> dict[str, FP8Delayed]:
    """The roles of a linear's recipe that have a delayed format."""
    formats = {role: getattr(r, role) for role in ROLES}
    return {role: fmt for role, fmt in formats.items() if isinstance(fmt, FP8Delayed)}


def arguments(linears: Sequence[Linear], like: Tensor, groups: int) -> tuple[list[Tensor], list[Tensor]]:
    """(scales, gradient histories) for an operator: three and one a linear, empty where unused; no list at all without need.

    Raises:
        ValueError: a delayed format without its scaling, or one whose tensors do not fit. TypeError: their dtype.
    """
    if not any(delayed_roles(r) for r, _ in linears):
        return [], []
    scales, histories = [], []
    for r, scaling in linears:
        wanted, own = delayed_roles(r), scaling or Scaling()
        found = {role: _checked(role, getattr(own, role), fmt, groups) for role, fmt in wanted.items()}
        scales += [found[role].scale if role in found else like.new_empty(0, dtype=torch.float32) for role in ROLES]
        histories.append(found["gradient"].amax_history if "gradient" in found else like.new_empty(0, dtype=torch.float32))
    return scales, histories


def _checked(role: str, found: RoleScaling | None, fmt: FP8Delayed, groups: int) -> RoleScaling:
    if found is None:
        raise ValueError(f"the recipe's {role} is FP8Delayed but scaling has no {role}; layers of blockscale.nn keep it themselves")
    shapes = (("scale", found.scale, (groups,)), ("amax_history", found.amax_history, (fmt.history, groups)))
    for name, t, shape in shapes:
        checks.shape(f"scaling.{role}.{name}", checks.dtype(f"scaling.{role}.{name}", t, (torch.float32,)), shape, "by group")
    return found


def of_linear(r: Recipe, scales: list[Tensor], histories: list[Tensor], index: int) -> tuple[dict[str, Tensor], Tensor | None]:
    """Inside an operator: the scales of linear ``index`` by role, and the history of its gradient."""
    if not scales:
        return {}, None
    own = dict(zip(ROLES, scales[3 * index : 3 * index + 3], strict=True))
    return {role: own[role] for role in delayed_roles(r)}, histories[index] if histories else None


def count(recipes: Sequence[Recipe]) -> int:
    """How many amaxes an operator's forward returns: of the input and the weight of each linear, where delayed."""
    return sum(role != "gradient" for r in recipes for role in delayed_roles(r))


def fake_amaxes(recipes: Sequence[Recipe], like: Tensor, groups: int) -> list[Tensor]:
    """Empty tensors like the amaxes that forward returns."""
    return [like.new_empty(groups, dtype=torch.float32) for _ in range(count(recipes))]


@torch.no_grad()
def record(linears: Sequence[Linear], outputs: list[Tensor]) -> None:
    """Enter the amaxes at the end of an operator's ``outputs`` in the histories."""
    kept = [getattr(s, role) for r, s in linears for role in delayed_roles(r) if role != "gradient"]
    for scaling, amax in zip(kept, outputs[len(outputs) - len(kept) :], strict=True):
        reference.record(scaling.amax_history, amax)
