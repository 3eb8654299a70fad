"""Layers: linear, grouped linear and MLP, router, mixture of experts; conversion of models that exist."""

from blockscale.nn.adapters import Adapter, ExpertWeights, register_adapter, run_experts, unregister_adapter
from blockscale.nn.convert import convert_model, converted_modules, restore_model
from blockscale.nn.grouped_linear import GroupedLinear
from blockscale.nn.grouped_mlp import GroupedMLP
from blockscale.nn.linear import Linear
from blockscale.nn.moe import MoE
from blockscale.nn.quantized import QuantizedGroupedLinear, QuantizedGroupedMLP
from blockscale.nn.quantized_weight import QuantizedWeight
from blockscale.nn.router import Router, Routing, expert_counts

__all__ = [
    "Adapter",
    "ExpertWeights",
    "GroupedLinear",
    "GroupedMLP",
    "Linear",
    "MoE",
    "QuantizedGroupedLinear",
    "QuantizedGroupedMLP",
    "QuantizedWeight",
    "Router",
    "Routing",
    "convert_model",
    "converted_modules",
    "expert_counts",
    "register_adapter",
    "restore_model",
    "run_experts",
    "unregister_adapter",
]
