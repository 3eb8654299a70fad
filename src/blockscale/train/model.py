"""A byte-level mixture-of-experts transformer. Letters: B batch, T context, H model width, V vocabulary.

Only the experts are quantized. Embedding, attention, norms, router and output head compute in float32, as do the parameters
and the optimizer. The experts' input is rounded to bfloat16 first, which is what block-scaled training gets on a GPU; it halves
what the layer saves for backward and makes the quantizers see the same values on every device.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

import blockscale as bs

VOCABULARY = 256


class Attention(nn.Module):
    """Causal multi-head attention with rotary positions, float32."""

    @dataclass(frozen=True)
    class Config:
        """``heads`` must divide the width into an even number of channels each."""

        heads: int = 4
        rotary_base: float = 10_000.0

    def __init__(self, config: Config, width: int, context: int) -> None:
        super().__init__()
        if width % (2 * config.heads):
            raise ValueError(f"width {width} must be a multiple of 2 * heads = {2 * config.heads}")
        self.heads = config.heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        half = width // config.heads // 2
        angles = torch.arange(context)[:, None] * config.rotary_base ** (-torch.arange(half) / half)
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)
        self.cos: torch.Tensor
        self.sin: torch.Tensor

    def forward(self, x_BTH: torch.Tensor) -> torch.Tensor:
        """[B, T, H] -> [B, T, H]."""
        batch, context, width = x_BTH.shape
        qkv = self.qkv(x_BTH).view(batch, context, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k, v = self._rotate(qkv[0]), self._rotate(qkv[1]), qkv[2]
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(y.transpose(1, 2).reshape(batch, context, width))
        return out

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, dim=-1)
        cos, sin = self.cos[: x.shape[-2]], self.sin[: x.shape[-2]]
        return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Experts(nn.Module):
    """`blockscale.nn.MoE` between float32 neighbours: its input is rounded to bfloat16, its output widened."""

    @dataclass(frozen=True)
    class Config:
        """Top-``top_k`` of ``num_experts`` experts of width ``intermediate``."""

        num_experts: int = 8
        top_k: int = 2
        intermediate: int = 256
        activation: str = "swiglu"
        aux_loss_coef: float = 0.01

    def __init__(self, config: Config, width: int) -> None:
        super().__init__()
        self.moe = bs.nn.MoE(
            width,
            config.intermediate,
            config.num_experts,
            config.top_k,
            activation=config.activation,
            aux_loss_coef=config.aux_loss_coef,
        )

    def forward(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, T, H] float32, auxiliary loss)."""
        y_BTH, aux_loss = self.moe(x_BTH.to(torch.bfloat16))
        return y_BTH.to(x_BTH.dtype), aux_loss


class Block(nn.Module):
    """Attention, then experts, each after a norm and beside a residual path."""

    def __init__(self, config: Transformer.Config, context: int) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.attention = Attention(config.attention, config.width, context)
        self.experts_norm = nn.RMSNorm(config.width, eps=1e-6)
        self.experts = Experts(config.experts, config.width)

    def forward(self, x_BTH: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, T, H], auxiliary loss)."""
        x_BTH = x_BTH + self.attention(self.attention_norm(x_BTH))
        y_BTH, aux_loss = self.experts(self.experts_norm(x_BTH))
        return x_BTH + y_BTH, aux_loss


class Transformer(nn.Module):
    """The whole model. Its initial weights depend on the seed alone, not on the recipe nor on torch's global generator."""

    @dataclass(frozen=True)
    class Config:
        """``width`` H, ``layers`` blocks."""

        width: int = 128
        layers: int = 3
        attention: Attention.Config = field(default_factory=Attention.Config)
        experts: Experts.Config = field(default_factory=Experts.Config)

    def __init__(self, config: Config, context: int, seed: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.blocks = nn.ModuleList(Block(config, context) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-6)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)
        self._initialize(config.layers, seed)

    @torch.no_grad()
    def _initialize(self, layers: int, seed: int) -> None:
        """Matrices from a normal of deviation 1/sqrt(fan in); those that write to the residual path 1/sqrt(2 layers) smaller."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in sorted(self.named_parameters()):
            if parameter.dim() < 2:
                continue
            deviation = 1.0 / math.sqrt(parameter.shape[-1])
            if name.endswith(("attention.out.weight", "fc2.weight")):
                deviation /= math.sqrt(2 * layers)
            drawn = torch.randn(parameter.shape, generator=generator) * deviation
            parameter.copy_(drawn.to(parameter.device))

    def forward(self, tokens_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [B, T] -> (logits float32 [B, T, V], auxiliary loss: the layers' sum)."""
        x_BTH = self.embedding(tokens_BT)
        aux_losses = []
        for block in self.blocks:
            x_BTH, aux_loss = block(x_BTH)
            aux_losses.append(aux_loss)
        return self.head(self.norm(x_BTH)), torch.stack(aux_losses).sum()

    def moe_layers(self) -> list[nn.Module]:
        """The quantized layers, first to last."""
        return [block.experts.moe for block in self.blocks if isinstance(block, Block)]

    def loss(self, inputs_BT: torch.Tensor, targets_BT: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(mean cross entropy in nats per byte, auxiliary loss), float32 scalars."""
        logits_BTV, aux_loss = self(inputs_BT)
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten()), aux_loss
