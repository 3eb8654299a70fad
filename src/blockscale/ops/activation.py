"""The operators ``activation`` and ``activation_backward`` and the public :func:`activation`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from blockscale.activations import Activation, parse
from blockscale.ops import backend, checks, registry

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def activation(
    h: Tensor,
    act: str | Activation,
    *,
    probs: Tensor | None = None,
    interleave: int | None = None,
    offsets: Tensor | None = None,
) -> Tensor:
    """The activation of an expert, times the router's probability of each row; differentiable in ``h`` and ``probs``.

    Args:
        h: [rows, W], the pre-activation, float32, bfloat16 or float16.
        act: name, spec string or :class:`~blockscale.activations.Activation`.
        probs: float32 [rows].
        interleave: None: a GLU's gate is the first W/2 columns; g: gate and linear alternate in runs of g columns.
        offsets: int64 [G+1]; rows from ``offsets[-1]`` on are dead: they influence nothing, their results are zero.

    Returns:
        [rows, W/2] for a GLU, else [rows, W], in h's dtype. Example: swiglu of the row [a, b] is a*sigmoid(a)*b.

    Raises:
        ValueError: a shape, an option or, on the CPU, offsets that do not start at 0, decrease, or end past the rows.
        TypeError: a dtype.
    """
    check_activation(h, probs, offsets, interleave)
    # a string is parsed, and the width checked, by the operator and its fake: Dynamo need not trace the parser
    spec = act if isinstance(act, str) else parse(act).spec()
    return torch.ops.blockscale.activation(h, probs, offsets, spec, interleave or 0)


def check_activation(h: Tensor, probs: Tensor | None, offsets: Tensor | None, interleave: int | None) -> None:
    """What metadata shows to be wrong raises ``ValueError`` or ``TypeError``; h's width is ``out_width``'s to check."""
    if h.dim() != 2:
        raise ValueError(f"h has shape {tuple(h.shape)}; [rows, columns] is needed")
    if h.dtype not in DTYPES:
        raise TypeError(f"h has dtype {h.dtype}; it must be one of {DTYPES}")
    if interleave is not None:
        checks.count("interleave", interleave)
    if probs is not None:
        if probs.dtype != torch.float32:
            raise TypeError(f"probs has dtype {probs.dtype}; it must be torch.float32")
        if probs.shape != h.shape[:1]:
            raise ValueError(f"probs has shape {tuple(probs.shape)}; one per row of h is needed, ({h.shape[0]},)")
        if probs.device != h.device:
            raise ValueError(f"probs is on {probs.device}; it must be on the device of h, {h.device}")
    if offsets is not None:
        checks.same_device(h=h, offsets=checks.offsets(offsets))


def check_gradient(dy: Tensor, h: Tensor, act: Activation, interleave: int | None) -> None:
    """The upstream gradient has the shape and the dtype of the result."""
    expected = (h.shape[0], act.out_width(h.shape[1], interleave))
    if dy.shape != expected or dy.dtype != h.dtype:
        raise ValueError(f"dy is {tuple(dy.shape)} {dy.dtype}; it must be {expected} {h.dtype}, like the result")


def run_forward(h: Tensor, probs: Tensor | None, offsets: Tensor | None, act: str, interleave: int) -> Tensor:
    """The implementation of the operator ``activation``."""
    if offsets is not None:
        checks.offset_values(offsets, h.shape[0])
    return backend.activation_forward(h, parse(act), probs, interleave or None, offsets)


def _forward_fake(h: Tensor, probs: Tensor | None, offsets: Tensor | None, act: str, interleave: int) -> Tensor:
    return h.new_empty(h.shape[0], parse(act).out_width(h.shape[1], interleave or None))


def run_backward(
    dy: Tensor, h: Tensor, probs: Tensor | None, offsets: Tensor | None, act: str, interleave: int
) -> tuple[Tensor, Tensor]:
    """The implementation of the operator ``activation_backward``."""
    parsed, runs = parse(act), interleave or None
    check_gradient(dy, h, parsed, runs)
    if offsets is not None:
        checks.offset_values(offsets, h.shape[0])
    dh, ds = backend.activation_backward(dy, h, parsed, probs, runs, offsets)
    return dh, h.new_empty(0, dtype=torch.float32) if ds is None else ds


def _backward_fake(
    dy: Tensor, h: Tensor, probs: Tensor | None, offsets: Tensor | None, act: str, interleave: int
) -> tuple[Tensor, Tensor]:
    return h.new_empty(h.shape), h.new_empty(0 if probs is None else h.shape[0], dtype=torch.float32)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, probs, offsets, ctx.act, ctx.interleave = inputs
    ctx.save_for_backward(h, probs, offsets)


def _autograd(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor | None, None, None, None]:
    h, probs, offsets = ctx.saved_tensors
    dh, ds = torch.ops.blockscale.activation_backward(dy, h, probs, offsets, ctx.act, ctx.interleave)
    return dh, None if probs is None else ds, None, None, None


registry.define(
    "activation(Tensor h, Tensor? probs, Tensor? offsets, str act, int interleave) -> Tensor",
    run_forward,
    _forward_fake,
)
registry.define(
    "activation_backward(Tensor dy, Tensor h, Tensor? probs, Tensor? offsets, str act, int interleave) -> (Tensor, Tensor)",
    run_backward,
    _backward_fake,
)
registry.autograd("activation", _autograd, _setup_context)
