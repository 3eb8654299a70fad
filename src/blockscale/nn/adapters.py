"""What convert_model knows about other libraries' mixture-of-experts modules: a registry that users can extend.

An adapter gives a module that it matches another ``forward``; the module keeps its parameters, their names and its place.
Nothing here imports the other library: modules are told by their structure and by names.

Legend: T tokens, E experts, k choices per token, H hidden, I intermediate, W = 2I columns of a gated pre-activation.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.activations import Activation, ClampedSwiglu
from blockscale.nn.delayed import ScaledLayer
from blockscale.ops.grouped_mlp import grouped_mlp
from blockscale.ops.routing import permute, unpermute
from blockscale.recipes import Recipe, current_recipe


@dataclass(frozen=True)
class ExpertWeights:
    """The weights of a layer's experts as ``grouped_mlp`` takes them: views of the module's parameters, or stacks of them.

    w1 (E, W, H), w2 (E, H, I), b1 (E, W), b2 (E, H); ``activation`` and ``interleave`` as in ``bs.grouped_mlp``.
    """

    w1: Tensor
    w2: Tensor
    b1: Tensor | None = None
    b2: Tensor | None = None
    activation: str | Activation = "swiglu"
    interleave: int | None = None


@dataclass(frozen=True)
class Adapter:
    """How one kind of module is run on grouped experts.

    Args:
        name: for reports.
        matches: whether a module is of this kind.
        forward: ``forward(module, recipe, *args, **kwargs)``, called in place of ``module.forward(*args, **kwargs)``.
        own: names of children that ``forward`` runs by itself (routers, experts): convert_model leaves them as they are.
    """

    name: str
    matches: Callable[[nn.Module], bool]
    forward: Callable[..., Any]
    own: tuple[str, ...] = ()


_adapters: list[Adapter] = []


def register_adapter(adapter: Adapter) -> Adapter:
    """Make ``convert_model`` know another kind of module; asked before those registered earlier. Returns the adapter."""
    _adapters.insert(0, adapter)
    return adapter


def unregister_adapter(adapter: Adapter) -> None:
    """Undo :func:`register_adapter`; modules that were converted with it stay converted.

    Raises:
        ValueError: it is not registered.
    """
    if adapter not in _adapters:
        raise ValueError(f"adapter {adapter.name!r} is not registered")
    _adapters.remove(adapter)


def find_adapter(module: nn.Module) -> Adapter | None:
    """The adapter registered last that matches, or None."""
    return next((a for a in _adapters if a.matches(module)), None)


#: names under which a converted module keeps the delayed scaling of its two linears
SCALINGS = ("scaling1", "scaling2")


def run_experts(
    x: Tensor,
    ids_Tk: Tensor,
    probs_Tk: Tensor,
    weights: ExpertWeights,
    recipe: Recipe | None,
    keeper: nn.Module | None = None,
) -> Tensor:
    """sum over the choices of prob * expert(x): [..., H] in x's dtype.

    Args:
        x: [..., H], T tokens in all.
        ids_Tk: int64 (T, k) in 0..E-1. probs_Tk: (T, k), any float dtype.
        keeper: the converted module, which keeps what delayed scaling needs; only recipes with ``FP8Delayed`` ask for it.

    The probabilities are applied in float32 to the activation, before it is quantized.
    """
    x_TH = x.reshape(-1, x.shape[-1])
    rows = permute(x_TH, ids_Tk, weights.w1.shape[0], probs_Tk.float())
    recipe, scaling = current_recipe(recipe), None
    if isinstance(keeper, ScaledLayer):
        roles = zip(("fc1", "fc2"), SCALINGS, strict=True)
        one, two = (keeper.scaling_for(recipe.of(linear), weights.w1.shape[0], name) for linear, name in roles)
        scaling = (one, two)
    y = grouped_mlp(
        rows.x,
        weights.w1,
        weights.w2,
        rows.offsets,
        activation=weights.activation,
        interleave=weights.interleave,
        probs=rows.probs,
        b1=weights.b1,
        b2=weights.b2,
        recipe=recipe,
        scaling=scaling,
    )
    return unpermute(y, rows.row_map).view(x.shape)


# fused experts of transformers 5: parameters gate_up_proj and down_proj with a leading expert dimension


def _is_silu(function: object) -> bool:
    return type(function).__name__ in ("SiLU", "SiLUActivation")


def _matches_fused(module: nn.Module) -> bool:
    parameters = (getattr(module, "gate_up_proj", None), getattr(module, "down_proj", None))
    if not all(isinstance(p, nn.Parameter) and p.dim() == 3 for p in parameters):
        return False
    own_gate = getattr(type(module), "_apply_gate", None)
    plain_gate = own_gate is None or own_gate.__name__ == "_default_apply_gate"
    flagged = hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)
    return plain_gate and flagged and _is_silu(getattr(module, "act_fn", None))


def fused_weights(module: Any) -> ExpertWeights:
    """The weights of a module with fused parameters, by the flags that transformers 5 sets on it."""
    w1, w2 = module.gate_up_proj, module.down_proj
    if module.is_transposed:
        w1, w2 = w1.mT, w2.mT
    b1, b2 = (module.gate_up_proj_bias, module.down_proj_bias) if module.has_bias else (None, None)
    return ExpertWeights(w1, w2, b1, b2, "swiglu", None if module.is_concatenated else 1)


def _fused_forward(
    module: nn.Module, recipe: Recipe | None, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    return run_experts(hidden_states, top_k_index, top_k_weights, fused_weights(module), recipe, module)


def _gpt_oss_forward(
    module: Any, recipe: Recipe | None, hidden_states: Tensor, router_indices: Tensor, routing_weights: Tensor
) -> Tensor:
    if routing_weights.shape != router_indices.shape:  # older versions give a dense (T, E) array of probabilities
        routing_weights = routing_weights.gather(1, router_indices)
    act = ClampedSwiglu(limit=float(module.limit), alpha=float(module.alpha), offset=1.0)
    w1, w2 = module.gate_up_proj.mT, module.down_proj.mT
    weights = ExpertWeights(w1, w2, module.gate_up_proj_bias, module.down_proj_bias, act, 1)
    return run_experts(hidden_states, router_indices, routing_weights, weights, recipe, module)


# lists of experts of transformers 4: a block with a Linear gate and a ModuleList of gated MLPs

_LIST_BLOCKS = ("Qwen3MoeSparseMoeBlock", "OlmoeSparseMoeBlock", "MixtralSparseMoeBlock")
_LIST_NAMES = (("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"))


def _list_names(expert: nn.Module) -> tuple[str, str, str] | None:
    for names in _LIST_NAMES:
        if all(isinstance(getattr(expert, n, None), nn.Linear) and getattr(expert, n).bias is None for n in names):
            return names
    return None


def _matches_list(module: nn.Module) -> bool:
    experts = getattr(module, "experts", None)
    if type(module).__name__ not in _LIST_BLOCKS or not isinstance(experts, nn.ModuleList) or len(experts) == 0:
        return False
    known = all(_list_names(e) and _is_silu(getattr(e, "act_fn", None)) for e in experts)
    return known and isinstance(getattr(module, "gate", None), nn.Linear)


def list_weights(experts: nn.ModuleList) -> ExpertWeights:
    """The weights of a list of gated MLPs, stacked (a copy a call); gradients reach each expert's own parameters."""
    names = _list_names(experts[0])
    assert names is not None
    gate, up, down = (torch.stack([getattr(e, name).weight for e in experts]) for name in names)
    return ExpertWeights(torch.cat((gate, up), 1), down)


def _list_forward(module: Any, recipe: Recipe | None, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
    logits = module.gate(hidden_states.reshape(-1, hidden_states.shape[-1]))
    probs, ids = torch.topk(torch.softmax(logits, dim=1, dtype=torch.float32), module.top_k, dim=-1)
    if getattr(module, "norm_topk_prob", True):
        probs = probs / probs.sum(dim=-1, keepdim=True)
    probs = probs.to(hidden_states.dtype)
    return run_experts(hidden_states, ids, probs, list_weights(module.experts), recipe, module), logits


register_adapter(Adapter("fused experts", _matches_fused, _fused_forward))
register_adapter(Adapter("gpt-oss experts", lambda m: type(m).__name__ == "GptOssExperts", _gpt_oss_forward))
register_adapter(Adapter("list of experts", _matches_list, _list_forward, own=("gate", "experts")))
