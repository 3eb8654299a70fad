"""One of each layer on the same tensors, for the tests of what a layer does besides its arithmetic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from support import normal
from torch import Tensor, nn

import blockscale as bs
from blockscale.recipes import Recipe

SIZES = torch.tensor([5, 0, 33])
KINDS = ("linear", "grouped_linear", "mlp", "moe")


def make(kind: str, recipe: Recipe | None, dtype: torch.dtype = torch.float32, **options: Any) -> nn.Module:
    """A layer of 20 inputs with random parameters, the same for the same kind."""
    torch.manual_seed(1)
    shared = {"recipe": recipe, "bias": True, "dtype": dtype, **options}
    if kind == "linear":
        return bs.nn.Linear(20, 16, **shared)
    if kind == "grouped_linear":
        return bs.nn.GroupedLinear(3, 20, 16, **shared)
    if kind == "mlp":
        return bs.nn.GroupedMLP(3, 20, 8, glu_interleave=4, **shared)
    return bs.nn.MoE(20, 8, 4, 2, aux_loss_coef=0.01, shared_intermediate=6, **shared)


def call(module: nn.Module, function: Callable[..., Any] | None = None) -> Callable[..., Tensor]:
    """x (40, 20) -> y, through ``function`` (the module compiled, say) if given."""
    f = module if function is None else function

    def run(x: Tensor) -> Tensor:
        if isinstance(module, bs.nn.MoE):
            y, loss = f(x)
            return y + 0 * loss
        if isinstance(module, bs.nn.Linear):
            return f(x)
        probs = (torch.linspace(0.1, 1, 40),) if isinstance(module, bs.nn.GroupedMLP) else ()
        return f(x, SIZES, *probs)

    return run


def step(module: nn.Module, microbatch: int = 0, function: Callable[..., Any] | None = None) -> dict[str, Tensor | None]:
    """Forward and backward on one microbatch: y and dx; parameters accumulate."""
    torch.manual_seed(50 + microbatch)
    dtype = next(p.dtype for n, p in module.named_parameters() if "router" not in n)
    x = normal(40, 20, seed=10 + microbatch, spread=1.0).to(dtype).requires_grad_()
    y = call(module, function)(x)
    y.backward(normal(*y.shape, seed=30 + microbatch, spread=1.0).to(dtype))
    return {"y": y.detach(), "x": x.grad}


def grads(module: nn.Module) -> dict[str, Tensor | None]:
    """Gradients by name, copied."""
    return {n: None if p.grad is None else p.grad.clone() for n, p in module.named_parameters()}


def weights(module: nn.Module) -> dict[str, nn.Parameter]:
    """The weights that products with quantized operands read."""
    return {n: p for n, p in module.named_parameters() if n.endswith("weight") and "router" not in n}
