"""Converted models train: a dense transformer and transformers' Qwen3-MoE in each recipe beside bf16; 3 steps, 50 if slow."""

import functools

import pytest
import torch
import torch.nn.functional as F
from support import RECIPES, normal
from torch import nn

import blockscale as bs

#: percent of bf16's validation loss: the bounds of the training job (train/recipes.py)
BOUNDS = {name: 4.0 if name.startswith("nvfp4") else 1.0 for name in RECIPES if name != "bf16"}
STEPS, BATCH, CONTEXT, VOCABULARY = 50, 16, 64, 64


@functools.cache
def text():
    """A second-order Markov chain over the vocabulary, four likely followers of each pair: something to learn."""
    generator = torch.Generator().manual_seed(0)
    followers = torch.randint(0, VOCABULARY, (VOCABULARY, VOCABULARY, 4), generator=generator)
    followers[:, :, :2] = followers[:1, :, :2]  # the last symbol alone says something already
    draws = torch.randint(0, 4, (40_000,), generator=generator).tolist()
    table, symbols = followers.tolist(), [0, 1]
    for draw in draws:
        symbols.append(table[symbols[-2]][symbols[-1]][draw])
    return torch.tensor(symbols)


def batch(step, size=BATCH):
    generator = torch.Generator().manual_seed(1000 + step)
    first = 30_000 if step < 0 else 0
    starts = torch.randint(first, first + 9_000 if step < 0 else 29_000, (size,), generator=generator)
    return text()[starts[:, None] + torch.arange(CONTEXT)]


class Block(nn.Module):
    """Causal attention and a feed-forward network."""

    def __init__(self, width):
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(self.norms[0](x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(a)
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Dense(nn.Module):
    def __init__(self, width=128, layers=2):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, width), nn.Parameter(0.02 * normal(CONTEXT, width, seed=1))
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.lm_head = nn.RMSNorm(width), nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, input_ids):
        x = self.blocks(self.embedding(input_ids) + self.positions)
        return self.lm_head(self.norm(x))


def qwen3_moe():
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        moe_intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=8,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def loss_of(model, ids):
    out = model(input_ids=ids)
    logits = out if isinstance(out, torch.Tensor) else out.logits
    return F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten())


def train(make, recipe, steps):
    """(validation loss before, after, losses of the steps)."""
    torch.manual_seed(0)
    model = bs.convert_model(make(), recipe, lambda name, m: name != "lm_head")
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95))
    held_out, losses = batch(-1, 128), []
    with torch.no_grad():
        before = loss_of(model, held_out).item()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * min(1.0, (step + 1) / 10) * (1 - step / STEPS)
        optimizer.zero_grad()
        loss = loss_of(model, batch(step))
        loss.backward()
        assert all(p.grad is not None and p.grad.any() and p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    with torch.no_grad():
        return before, loss_of(model, held_out).item(), losses


MODELS = pytest.mark.parametrize("make", [Dense, qwen3_moe], ids=["dense", "qwen3_moe"])


@MODELS
def test_three_steps(make):
    before, baseline, losses = train(make, RECIPES["bf16"], 3)
    assert baseline < before
    for name in ("mxfp8", "nvfp4", "fp8_current", "fp8_block"):
        _, after, others = train(make, RECIPES[name], 3)
        gaps = [100 * (b / a - 1) for a, b in zip([*losses, baseline], [*others, after], strict=True)]
        print(f"{make.__name__}: {name} {gaps}")
        assert 0 < max(map(abs, gaps)) < BOUNDS[name], name


@pytest.mark.slow
@MODELS
def test_fifty_steps(make):
    before, baseline, _ = train(make, RECIPES["bf16"], STEPS)
    print(f"{make.__name__}: {before:.4f} -> bf16 {baseline:.4f}")
    assert baseline < 0.9 * before
    for name, bound in BOUNDS.items():
        after = train(make, RECIPES[name], STEPS)[1]
        gap = 100 * (after / baseline - 1)
        print(f"{make.__name__}: {name} {after:.4f} ({gap:+.2f} %)")
        assert 0 < abs(gap) < bound, name
