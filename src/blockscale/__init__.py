"""blockscale: block-scaled (MXFP8, MXFP4, NVFP4, FP8) mixture-of-experts layers for PyTorch.

Formats, quantizers and grouped GEMMs at the top; layers in ``blockscale.nn``; what runs and why from ``explain``.
"""

from importlib.metadata import version

from blockscale import activations, formats, layouts, recipes
from blockscale.formats import MXFP4, MXFP8, NVFP4, FP8Block, FP8Delayed, FP8Tensor, Hybrid
from blockscale.layouts import offsets_from_sizes
from blockscale.ops import dequantize as _dequantize  # noqa: F401  (an operator)
from blockscale.ops.activation import activation
from blockscale.ops.activation_quantize import activation_backward_quantize, activation_quantize
from blockscale.ops.device_status import DeviceCheckError, check
from blockscale.ops.explain import Explanation, explain
from blockscale.ops.frozen_linear import frozen_linear
from blockscale.ops.frozen_mlp import frozen_mlp
from blockscale.ops.grouped_gemm import grouped_gemm
from blockscale.ops.grouped_linear import grouped_linear
from blockscale.ops.grouped_mlp import grouped_mlp
from blockscale.ops.low_rank import LowRank
from blockscale.ops.quantize import quantize, quantize_grouped
from blockscale.ops.routing import Permuted, permute, unpermute
from blockscale.recipes import autocast
from blockscale.tensors import BlockScaledTensor, GroupedTensor, Plane, load, save

from blockscale.ops import registry as _registry  # isort: skip

_registry.finish()

from blockscale import nn  # isort: skip  # noqa: E402  (knows the operators above)
from blockscale.watching import Watch, WatchStop, watch  # isort: skip  # noqa: E402
from blockscale.nn.convert import convert_model, restore_model  # isort: skip  # noqa: E402
from blockscale.nn.delayed import reduce_amax_over, update_scales  # isort: skip  # noqa: E402

__version__ = version("blockscale")

__all__ = [
    "MXFP4",
    "MXFP8",
    "NVFP4",
    "BlockScaledTensor",
    "DeviceCheckError",
    "Explanation",
    "FP8Block",
    "FP8Delayed",
    "FP8Tensor",
    "GroupedTensor",
    "Hybrid",
    "LowRank",
    "Permuted",
    "Plane",
    "Watch",
    "WatchStop",
    "activation",
    "activation_backward_quantize",
    "activation_quantize",
    "activations",
    "autocast",
    "check",
    "convert_model",
    "explain",
    "formats",
    "frozen_linear",
    "frozen_mlp",
    "grouped_gemm",
    "grouped_linear",
    "grouped_mlp",
    "layouts",
    "load",
    "nn",
    "offsets_from_sizes",
    "permute",
    "quantize",
    "quantize_grouped",
    "recipes",
    "reduce_amax_over",
    "restore_model",
    "save",
    "unpermute",
    "update_scales",
    "watch",
]
