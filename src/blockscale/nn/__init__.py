"""Layers: grouped linear and MLP, router, mixture of experts."""

from blockscale.nn.grouped_linear import GroupedLinear
from blockscale.nn.grouped_mlp import GroupedMLP
from blockscale.nn.moe import MoE
from blockscale.nn.router import Router, Routing

__all__ = ["GroupedLinear", "GroupedMLP", "MoE", "Router", "Routing"]
