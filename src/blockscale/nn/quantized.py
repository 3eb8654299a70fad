"""QuantizedGroupedLinear and QuantizedGroupedMLP: experts whose weights exist only in quantized form, with LoRA.

For frozen bases and for serving. Legend: M rows, H hidden, I intermediate, K inputs, N outputs, R rank, G groups.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from blockscale.activations import Activation, parse
from blockscale.formats import Format
from blockscale.nn.grouped_linear import GroupedLinear, resolve_offsets
from blockscale.nn.grouped_mlp import GroupedMLP
from blockscale.nn.quantized_weight import QuantizedWeight
from blockscale.ops import checks
from blockscale.ops.frozen_linear import frozen_linear
from blockscale.ops.frozen_mlp import frozen_mlp
from blockscale.ops.low_rank import LowRank
from blockscale.recipes import Recipe, check_recipe


class QuantizedGroupedLinear(nn.Module):
    """y = x W_g^T + b_g + scaling * (x A_g^T) B_g^T with a frozen W in a block-scaled format; A and B are optional.

    The weight is drawn and quantized a group at a time: no more than one group of it is ever in high precision. A state
    dict of a GroupedLinear loads too, quantized a group at a time.

    Args:
        num_groups: G >= 1. in_features, out_features: K, N.
        format: of the weight.
        bias: hold a frozen bias (G, N).
        recipe: formats of the input and the gradient; its weight's format does not matter. None: the enclosing
            autocast's, else bfloat16 operands.
        backward: hold the columnwise plane too, which the gradient of the input needs. False: half the memory.
        initialize: False: weight and bias are zero, to be loaded. So they are on the meta device.
        device: of everything. dtype: of the bias, and of the weight as it is drawn.

    Attributes:
        weight: a :class:`~blockscale.nn.quantized_weight.QuantizedWeight`. bias: a buffer (G, N) or None.
        lora_a (G, R, K), lora_b (G, N, R): parameters, None without an adapter. lora_scaling: alpha / R.
    """

    bias: Tensor | None
    lora_a: nn.Parameter | None
    lora_b: nn.Parameter | None

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        format: Format,
        bias: bool = False,
        recipe: Recipe | None = None,
        backward: bool = True,
        initialize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("num_groups", num_groups), ("in_features", in_features), ("out_features", out_features)):
            checks.count(name, value)
        checks.flag("bias", bias)
        checks.flag("initialize", initialize)
        if dtype is not None and dtype not in checks.FLOATS:
            raise TypeError(f"dtype={dtype}; legal: {checks.names(checks.FLOATS)}")
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.recipe = None if recipe is None else check_recipe(recipe)
        self.weight = QuantizedWeight(num_groups, out_features, in_features, format, backward, device)
        self.register_buffer("bias", torch.zeros(num_groups, out_features, device=device, dtype=dtype) if bias else None)
        self.register_parameter("lora_a", None)
        self.register_parameter("lora_b", None)
        self.lora_scaling = 1.0
        self._unmerged: tuple[nn.Parameter, nn.Parameter, dict[str, Tensor]] | None = None
        if initialize and self.weight.rowwise_data.device.type != "meta":
            self.reset_parameters(dtype)

    def reset_parameters(self, dtype: torch.dtype | None = None) -> None:
        """Draw weight and bias anew in +-1/sqrt(K), as GroupedLinear; ``dtype``: in which the weight is drawn."""
        device, bound = self.weight.rowwise_data.device, 1 / math.sqrt(self.in_features)

        def draw(g: int) -> Tensor:
            return torch.empty(self.out_features, self.in_features, device=device, dtype=dtype).uniform_(-bound, bound)

        self.weight.fill(draw)
        if self.bias is not None:
            self.bias.uniform_(-bound, bound)

    @classmethod
    def from_linear(
        cls, linear: GroupedLinear, format: Format, recipe: Recipe | None = None, backward: bool = True
    ) -> QuantizedGroupedLinear:
        """The same layer with its weight quantized and frozen; ``recipe``: None: the layer's own."""
        if not isinstance(linear, GroupedLinear):
            raise TypeError(f"linear is {type(linear).__name__}; a GroupedLinear is needed")
        w, sizes = linear.weight, (linear.num_groups, linear.in_features, linear.out_features)
        made = cls(*sizes, format, linear.bias is not None, recipe or linear.recipe, backward, False, w.device, w.dtype)
        made.load_state_dict(linear.state_dict())
        return made

    def add_lora(self, rank: int, alpha: float | None = None, dtype: torch.dtype | None = None) -> None:
        """Add an adapter: A uniform in +-1/sqrt(K), B zero, so that the layer computes what it did.

        Args:
            rank: R >= 1. alpha: the adapter's product is multiplied by alpha / R; None: R.
            dtype: of A and B.

        Raises:
            RuntimeError: there is one already. TypeError, ValueError: an argument.
        """
        if self.lora_a is not None or self._unmerged is not None:
            raise RuntimeError(f"the layer has an adapter{' (merged)' if self._unmerged else ''}; remove_lora() first")
        checks.count("rank", rank)
        alpha = float(rank) if alpha is None else float(alpha)
        if not math.isfinite(alpha):
            raise ValueError(f"alpha={alpha} is not legal; it must be finite")
        if dtype is not None and dtype not in checks.FLOATS:
            raise TypeError(f"dtype={dtype}; legal: {checks.names(checks.FLOATS)}")
        device, bound = self.weight.rowwise_data.device, 1 / math.sqrt(self.in_features)
        a = torch.empty(self.num_groups, rank, self.in_features, device=device, dtype=dtype).uniform_(-bound, bound)
        self.lora_a = nn.Parameter(a)
        self.lora_b = nn.Parameter(torch.zeros(self.num_groups, self.out_features, rank, device=device, dtype=dtype))
        self.lora_scaling = alpha / rank

    def remove_lora(self) -> None:
        """Drop the adapter; a merged one stays in the weight for good."""
        self.lora_a = self.lora_b = self._unmerged = None

    def merge_lora(self) -> None:
        """Put the adapter into the weight: each group becomes quantize(W + scaling * B A), W from the rowwise plane.

        The adapter leaves the layer, and so its state dict, until :meth:`unmerge_lora` brings both back to the bit; the
        planes of before wait in host memory.

        Raises:
            RuntimeError: there is no adapter, or it is merged.
        """
        if self.lora_a is None or self.lora_b is None:
            raise RuntimeError("there is no adapter to merge" + (": it is merged" if self._unmerged else "; add_lora() first"))
        a, b, scaling = self.lora_a, self.lora_b, self.lora_scaling
        before = {name: t.to("cpu", copy=True) for name, t in self.weight.named_buffers()}

        def merged(g: int) -> Tensor:
            return self.weight.group(g).dequantize() + (b[g].float() @ a[g].float()).mul_(scaling)

        with torch.no_grad():
            self.weight.fill(merged)
        self.lora_a = self.lora_b = None
        self._unmerged = a, b, before

    def unmerge_lora(self) -> None:
        """Undo :meth:`merge_lora`; ``RuntimeError`` when nothing is merged."""
        if self._unmerged is None:
            raise RuntimeError("nothing is merged; merge_lora() first")
        self.lora_a, self.lora_b, before = self._unmerged
        for adapter in (self.lora_a, self.lora_b):  # the layer may have moved meanwhile
            adapter.data = adapter.data.to(self.weight.rowwise_data.device)
        for name, t in self.weight.named_buffers():
            t.copy_(before[name])
        self._unmerged = None

    def lora(self) -> LowRank | None:
        """The adapter as the operators take it."""
        if self.lora_a is None or self.lora_b is None:
            return None
        return LowRank(self.lora_a, self.lora_b, self.lora_scaling)

    def forward(self, x: Tensor, sizes: Tensor | None = None, *, offsets: Tensor | None = None) -> Tensor:
        """y of x (M, K), rows sorted by group; arguments and result as in GroupedLinear."""
        offsets = resolve_offsets(sizes, offsets)
        return frozen_linear(x, self.weight.tensor(), offsets, self.bias, lora=self.lora(), recipe=self.recipe)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        w = state_dict.pop(prefix + "weight", None)
        if w is not None:  # high precision: of a GroupedLinear
            checks.shape(prefix + "weight", w, self.weight.shape, "(groups, outputs, inputs)")
            for buffer in self.weight.buffers():  # bytes between the groups, where to_empty() made them
                buffer.zero_()
            self.weight.fill(lambda g: w[g])
            state_dict |= self.weight.state_dict(prefix=f"{prefix}weight.")
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def extra_repr(self) -> str:
        """Sizes, adapter and recipe."""
        rank = "" if self.lora_a is None else f", rank={self.lora_a.shape[1]}, scaling={self.lora_scaling}"
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        shape = f"num_groups={self.num_groups}, in_features={self.in_features}, out_features={self.out_features}"
        return f"{shape}, bias={self.bias is not None}{rank}{recipe}"


class QuantizedGroupedMLP(nn.Module):
    """y = s * (W2 act(W1 x + b1) + b2) as GroupedMLP, with frozen weights in a block-scaled format and optional LoRA.

    It stands where a GroupedMLP stands: ``moe.experts = QuantizedGroupedMLP.from_mlp(moe.experts, bs.NVFP4())``.

    Args:
        num_groups, hidden, intermediate, activation, bias, glu_interleave: as in GroupedMLP.
        format, recipe, backward, initialize, device, dtype: as in :class:`QuantizedGroupedLinear`.
        recompute: keep x alone between the passes and compute the pre-activation again in backward.

    Attributes:
        fc1, fc2: :class:`QuantizedGroupedLinear`, (G, 2I or I, H) and (G, H, I).
    """

    def __init__(
        self,
        num_groups: int,
        hidden: int,
        intermediate: int,
        format: Format,
        activation: str | Activation = "swiglu",
        recipe: Recipe | None = None,
        bias: bool = False,
        glu_interleave: int | None = None,
        backward: bool = True,
        recompute: bool = False,
        initialize: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.activation = parse(activation)
        width = self.activation.pre_width(checks.count("intermediate", intermediate))
        self.activation.out_width(width, glu_interleave)
        self.glu_interleave, self.recipe, self.recompute = glu_interleave, recipe, checks.flag("recompute", recompute)
        shared = (format, bias, recipe, backward, initialize, device, dtype)
        self.fc1 = QuantizedGroupedLinear(num_groups, hidden, width, *shared)
        self.fc2 = QuantizedGroupedLinear(num_groups, intermediate, hidden, *shared)

    @classmethod
    def from_mlp(cls, mlp: GroupedMLP, format: Format, recipe: Recipe | None = None, backward: bool = True) -> QuantizedGroupedMLP:
        """The same layer with its weights quantized and frozen; ``recipe``: None: the layer's own."""
        if not isinstance(mlp, GroupedMLP):
            raise TypeError(f"mlp is {type(mlp).__name__}; a GroupedMLP is needed")
        groups, hidden, intermediate = mlp.fc2.num_groups, mlp.fc1.in_features, mlp.fc2.in_features
        own, recipe = mlp.fc1.bias is not None, recipe or mlp.recipe
        weight = mlp.fc1.weight
        options = (recipe, own, mlp.glu_interleave, backward, mlp.recompute, False, weight.device, weight.dtype)
        made = cls(groups, hidden, intermediate, format, mlp.activation, *options)
        made.load_state_dict(mlp.state_dict())
        return made

    def linears(self) -> list[QuantizedGroupedLinear]:
        """fc1 and fc2."""
        return [self.fc1, self.fc2]

    def add_lora(self, rank: int, alpha: float | None = None, dtype: torch.dtype | None = None) -> None:
        """An adapter for both linears, as :meth:`QuantizedGroupedLinear.add_lora` (which adds one to a single linear)."""
        for linear in self.linears():
            linear.add_lora(rank, alpha, dtype)

    def remove_lora(self) -> None:
        """Drop the adapters."""
        for linear in self.linears():
            linear.remove_lora()

    def merge_lora(self) -> None:
        """As :meth:`QuantizedGroupedLinear.merge_lora`, for each linear that has an adapter.

        Raises:
            RuntimeError: none has one.
        """
        adapted = [linear for linear in self.linears() if linear.lora_a is not None]
        for linear in adapted or self.linears():
            linear.merge_lora()

    def unmerge_lora(self) -> None:
        """Undo :meth:`merge_lora`; ``RuntimeError`` when nothing is merged."""
        merged = [linear for linear in self.linears() if linear._unmerged is not None]
        for linear in merged or self.linears():
            linear.unmerge_lora()

    def forward(
        self, x: Tensor, sizes: Tensor | None = None, probs: Tensor | None = None, *, offsets: Tensor | None = None
    ) -> Tensor:
        """y of x (M, H), rows sorted by group; arguments and result as in GroupedMLP."""
        return frozen_mlp(
            x,
            self.fc1.weight.tensor(),
            self.fc2.weight.tensor(),
            resolve_offsets(sizes, offsets),
            activation=self.activation,
            interleave=self.glu_interleave,
            probs=probs,
            b1=self.fc1.bias,
            b2=self.fc2.bias,
            lora1=self.fc1.lora(),
            lora2=self.fc2.lora(),
            recipe=self.recipe,
            recompute=self.recompute,
        )

    def extra_repr(self) -> str:
        """Activation, interleave and recipe."""
        recipe = "" if self.recipe is None else f", recipe={self.recipe.name}"
        return f"activation={self.activation.spec()}, glu_interleave={self.glu_interleave}{recipe}"
