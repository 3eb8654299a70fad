"""How every operator of blockscale is registered: one library, one helper.

``Library.define`` / ``impl`` costs less than half of what ``torch.library.custom_op`` costs per call.
The implementation is registered as ``CompositeExplicitAutograd``: one entry for every device; the choice of a
backend is made inside (and reported by ``explain``).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from blockscale.ops.device_status import raise_pending

NAMESPACE = "blockscale"
_defined: set[str] = set()
_differentiable: set[str] = set()
_library = torch.library.Library(NAMESPACE, "DEF")


def define(schema: str, impl: Callable[..., Any], fake: Callable[..., Any]) -> torch._ops.OpOverload:
    """Register an operator and return it.

    Args:
        schema: torch schema without the namespace, such as ``"double(Tensor x) -> Tensor"``.
        impl: the implementation; may check values, raises ``ValueError`` / ``TypeError``.
        fake: returns empty tensors of the right shape from metadata alone.
    """
    name = schema.split("(", 1)[0]
    _defined.add(name)
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, _after_errors(impl), "CompositeExplicitAutograd")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    packet = getattr(getattr(torch.ops, NAMESPACE), name)
    overload: torch._ops.OpOverload = packet.default
    for key in (torch._C.DispatchKey.AutocastCPU, torch._C.DispatchKey.AutocastCUDA):
        _library.impl(name, _below_autocast(overload, key), key.name)
    return overload


def _after_errors(impl: Callable[..., Any]) -> Callable[..., Any]:
    """What an earlier kernel found wrong is told before anything else is done."""

    @wraps(impl)
    def kernel(*args: Any) -> Any:
        raise_pending()
        return impl(*args)

    return kernel


def _below_autocast(op: torch._ops.OpOverload, key: torch._C.DispatchKey) -> Callable[..., Any]:
    """``torch.autocast`` must not lower the precision of what an implementation computes."""
    without = torch._C.DispatchKeySet(key)

    def kernel(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(without):
            return op(*args)

    return kernel


def autograd(name: str, backward: Callable[..., Any], setup_context: Callable[..., None]) -> None:
    """Give operator ``name`` its first derivative (see ``torch.library.register_autograd``); a second one is an error."""
    _differentiable.add(name)
    once = _once_differentiable(name, backward)
    torch.library.register_autograd(f"{NAMESPACE}::{name}", once, setup_context=setup_context, lib=_library)


def _once_differentiable(name: str, backward: Callable[..., Any]) -> Callable[..., Any]:
    message = f"blockscale::{name} has no second derivative; what its backward returned cannot be differentiated".encode()

    def once(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            result = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # the usual case: create_graph=False
            return result
        made = [g for g in result if isinstance(g, torch.Tensor)]
        raising = iter(torch._C._functions.DelayedError(message, len(made))(*(g.detach().requires_grad_() for g in made)))
        return tuple(next(raising) if isinstance(g, torch.Tensor) else g for g in (result if made else ()))

    return once


def finish() -> None:
    """Make every operator without a derivative one whose results never require grad. Called once, after all are defined."""
    for name in _defined - _differentiable:
        packet = getattr(getattr(torch.ops, NAMESPACE), name)
        _library.impl(name, _without_grad(packet.default), "Autograd", with_keyset=True)


def _without_grad(op: torch._ops.OpOverload) -> Callable[..., Any]:
    def kernel(keyset: torch._C.DispatchKeySet, *args: Any) -> Any:
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keyset & torch._C._after_autograd_keyset, *args)

    return kernel
