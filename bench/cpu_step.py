"""A training step of GroupedMLP (forward and backward) on the CPU in each recipe, against bfloat16; and many tiny groups.

    OMP_NUM_THREADS=2 python bench/cpu_step.py [--rounds 7] [--tokens 4096] [--hidden 1024] [--intermediate 1024] [--experts 8]

"bf16" is the layer without a recipe; "plain torch" is the same step written with torch's own bfloat16 operators, expert by
expert, its activations in bfloat16: less precise, and what a user would write.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
import torch.nn.functional as F
from common import Arm, environment, interleave, ratio, verdict, write
from torch import Tensor

import blockscale as bs

RECIPES = {
    "bf16": bs.recipes.BF16(),
    "MXFP8": bs.recipes.MXFP8Training(),
    "NVFP4": bs.recipes.NVFP4Training(),
    "FP8 per tensor": bs.recipes.FP8CurrentTraining(),
    "FP8 per block": bs.recipes.FP8BlockTraining(),
}


def layer_step(mlp: bs.nn.GroupedMLP, x: Tensor, sizes: Tensor, dy: Tensor, recipe: bs.recipes.Recipe) -> None:
    """Forward and backward, gradients dropped."""
    with bs.autocast(recipe):
        y = mlp(x, sizes)
    y.backward(dy)
    mlp.zero_grad()
    x.grad = None


def plain_step(mlp: bs.nn.GroupedMLP, x: Tensor, sizes: list[int], dy: Tensor) -> None:
    """The same in torch's operators."""
    parts = []
    for g, rows in enumerate(x.split(sizes)):
        gate, linear = F.linear(rows, mlp.fc1.weight[g]).chunk(2, 1)
        parts.append(F.linear(F.silu(gate) * linear, mlp.fc2.weight[g]))
    torch.cat(parts).backward(dy)
    mlp.zero_grad()
    x.grad = None


def tiny_groups(groups: int, rows: int, columns: int, rounds: int) -> list[Arm]:
    """Quantization and a product of many groups of few rows."""
    x = torch.randn(groups * rows, columns).bfloat16()
    offsets = torch.arange(groups + 1) * rows
    arms = []
    for name, fmt in (("MXFP8", bs.MXFP8()), ("NVFP4", bs.NVFP4())):
        arms.append(Arm(f"quantize {name}, both planes", lambda f=fmt: bs.quantize_grouped(x, offsets, f, columnwise=True)))
    w = bs.quantize_grouped(torch.randn(groups, 64, columns).bfloat16(), None, bs.MXFP8())
    a = bs.quantize_grouped(x, offsets, bs.MXFP8())
    arms.append(Arm("grouped GEMM MXFP8, 64 outputs", lambda: bs.grouped_gemm(a, w)))
    interleave(arms, rounds)
    return arms


def main() -> None:
    """Time, compare, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("rounds", 7), ("tokens", 4096), ("hidden", 1024), ("intermediate", 1024), ("experts", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    o = parser.parse_args()
    torch.manual_seed(0)
    mlp = bs.nn.GroupedMLP(o.experts, o.hidden, o.intermediate, dtype=torch.bfloat16)
    x = torch.randn(o.tokens, o.hidden).bfloat16().requires_grad_()
    dy = torch.randn(o.tokens, o.hidden).bfloat16()
    sizes = [o.tokens * (g + 1) // o.experts - o.tokens * g // o.experts for g in range(o.experts)]
    size_tensor = torch.tensor(sizes)
    arms = {name: Arm(name, lambda r=r: layer_step(mlp, x, size_tensor, dy, r)) for name, r in RECIPES.items()}
    plain = Arm("plain torch", lambda: plain_step(mlp, x, sizes, dy))
    interleave([*arms.values(), plain], o.rounds)
    rows = [["step", "best ms", "median ms", "of bf16 (best)", "of bf16 (median)"]]
    found: dict[str, Any] = {"shape": vars(o), "step": [], "tiny_groups": []}
    for arm in (*arms.values(), plain):
        against = ratio(arm, arms["bf16"])
        found["step"].append({"name": arm.name, "seconds": arm.seconds, "of_bf16": against})
        rows.append([arm.name, f"{1e3 * arm.best:.0f}", f"{1e3 * arm.median:.0f}", *(f"{v:.2f}" for v in against.values())])
    tiny = tiny_groups(1024, 4, 1024, o.rounds)
    for arm in tiny:
        found["tiny_groups"].append({"name": arm.name, "seconds": arm.seconds})
        rows.append([f"1024 groups of 4 rows of 1024: {arm.name}", f"{1e3 * arm.best:.1f}", f"{1e3 * arm.median:.1f}", "", ""])
    worst = max(ratio(arms["MXFP8"], arms["bf16"]).values())
    notes = [verdict("MXFP8 step, of the bf16 step", worst, 2, False)]
    notes.append(verdict("MXFP8 step, of plain torch's bf16 step", max(ratio(arms["MXFP8"], plain).values()), 2, False))
    title = f"GroupedMLP training step on the CPU, {o.tokens} tokens, {o.hidden}x{o.intermediate}, {o.experts} experts"
    write("cpu_step", f"{title}, {torch.get_num_threads()} threads", found, rows, notes, environment())


if __name__ == "__main__":
    main()
