"""Quantized tensors: data, scales, extents."""

from blockscale.tensors.io import load, save
from blockscale.tensors.tensor import BlockScaledTensor, GroupedTensor, Plane, planes_from_list

__all__ = ["BlockScaledTensor", "GroupedTensor", "Plane", "load", "planes_from_list", "save"]
