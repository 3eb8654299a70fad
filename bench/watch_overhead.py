"""What ``bs.watch`` costs a step of the CPU training job: the same step with and without it, in turn.

    python bench/watch_overhead.py [--steps 60] [--every 20] [--recipes bf16,mxfp8,nvfp4,fp8block] [--out bench/results]

Two models with the same weights take the same batches; which goes first alternates. A step is the job's: forward, backward,
clipping, AdamW; with the watch, its ``step()`` and a JSON-lines log too. Reported: the median of the paired differences
over the median step, full steps and those between weighted as they occur, for wall time and for processor time (which
other work on the machine disturbs less), with a 95 % interval by bootstrap.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

import blockscale as bs
from blockscale.report import Column, Table, describe_environment, table_to_rich, write_json, write_text
from blockscale.report import text as show
from blockscale.train import CHOICES, Job, Transformer
from blockscale.train.optimizer import make_optimizer

COLUMNS = (
    Column("recipe", "recipe", align="left"),
    Column("every", "every"),
    Column("step_ms", "step, ms", show.fixed(1)),
    Column("wall_percent", "watch, wall", show.percent(2)),
    Column("wall_low", "low", show.percent(2)),
    Column("wall_high", "high", show.percent(2)),
    Column("cpu_percent", "watch, processor", show.percent(2)),
    Column("cpu_low", "low", show.percent(2)),
    Column("cpu_high", "high", show.percent(2)),
)


class Arm:
    """One model, watched or not."""

    def __init__(self, config: Job.Config, recipe: str) -> None:
        self.model = Transformer(config.model, config.batches.context, config.seed)
        self.optimizer = make_optimizer(self.model, config.training.optimizer)
        self.recipe, self.clip = CHOICES[recipe].make(), config.training.optimizer.clip_norm
        self.watch: bs.Watch | None = None

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[float, float]:
        """(wall, processor) seconds of one step."""
        wall, cpu = time.perf_counter(), time.process_time()
        with bs.autocast(self.recipe):
            loss, aux_loss = self.model.loss(inputs, targets)
        (loss + aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        loss.item()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.watch is not None:
            self.watch.step()
        return time.perf_counter() - wall, time.process_time() - cpu


def measure(recipe: str, steps: int, every: int, warmup: int = 3) -> dict[str, Any]:
    """The costs of one recipe, in percent of a step."""
    config, draw = Job.Config(), torch.Generator().manual_seed(0)
    plain, watched = Arm(config, recipe), Arm(config, recipe)
    with tempfile.TemporaryDirectory() as folder:
        watched.watch = bs.watch(watched.model, every=every, log=Path(folder) / "watch.jsonl")
        pairs = []
        for n in range(warmup + steps):
            tokens = torch.randint(256, (config.batches.size, config.batches.context + 1), generator=draw)
            batch = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
            order = (plain, watched) if n % 2 else (watched, plain)
            times = {}
            for arm in order:
                torch.manual_seed(n)  # stochastic rounding draws from it
                times[arm] = arm.step(*batch)
            if n >= warmup:
                pairs.append((times[plain], times[watched], n % every == 0))
        watched.watch.close()
    same = all(torch.equal(a, b) for a, b in zip(plain.model.parameters(), watched.model.parameters(), strict=True))
    if not same:
        raise RuntimeError(f"{recipe}: the watched model ended with other weights")
    found: dict[str, Any] = {"recipe": recipe, "every": every, "steps": steps, "same_bits": same}
    found["step_ms"] = 1e3 * statistics.median(p[0] for p, _, _ in pairs)
    for index, name in ((0, "wall"), (1, "cpu")):
        sample = [(p[index], w[index], full) for p, w, full in pairs]
        found[f"{name}_percent"], found[f"{name}_low"], found[f"{name}_high"] = overhead(sample, every)
    return found


Pair = tuple[float, float, bool]


def overhead(pairs: list[Pair], every: int) -> tuple[float, float, float]:
    """(estimate, low, high) in percent, of (plain, watched, a full step or not)."""
    kinds = [[pair for pair in pairs if pair[2] == full] for full in (False, True)]

    def estimate(light: list[Pair], full: list[Pair]) -> float:
        costs = [statistics.median(w - p for p, w, _ in kind) if kind else None for kind in (light, full)]
        light_cost, full_cost = (c if c is not None else costs[1 - i] for i, c in enumerate(costs))
        cost = ((every - 1) * light_cost + full_cost) / every
        return 100 * cost / statistics.median(p for p, _, _ in light + full)

    draw = random.Random(0)
    drawn = sorted(estimate(*(draw.choices(k, k=len(k)) if k else [] for k in kinds)) for _ in range(1000))
    return estimate(*kinds), drawn[25], drawn[974]


def commit() -> str:
    """The commit, with a mark when files differ from it."""
    folder = Path(__file__).parent
    run = lambda *args: subprocess.run(["git", *args], cwd=folder, capture_output=True, text=True, check=False).stdout.strip()  # noqa: E731
    dirty = " with changes" if run("status", "--porcelain", "--untracked-files=no") else ""
    return (run("rev-parse", "--short", "HEAD") or "unknown") + dirty


def main() -> None:
    """Measure and write."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--steps", type=int, default=60)
    options.add_argument("--every", type=int, default=20)
    options.add_argument("--recipes", default="bf16,mxfp8,nvfp4,fp8block")
    options.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    chosen = options.parse_args()
    rows = [measure(name, chosen.steps, chosen.every) for name in chosen.recipes.split(",")]
    load = os.getloadavg()[0]
    table = Table("", COLUMNS, [{c.key: row[c.key] for c in COLUMNS} for row in rows], note="low, high: 95 % interval")
    facts = {
        "what": "cost of bs.watch in percent of a step of the training job (default model and batches), paired steps in turn",
        "command": "python bench/watch_overhead.py " + " ".join(sys.argv[1:]),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d"),
        "cores": os.cpu_count(),
        "load": round(load, 1),
        "processor": processor(),
        "environment": describe_environment(torch.device("cpu")),
    }
    console = Console(width=130, no_color=True)
    with console.capture() as captured:
        console.print(table_to_rich(table))
    print(captured.get())
    name = f"watch_overhead_every{chosen.every}"
    write_json(chosen.out / f"{name}.json", {**facts, "rows": rows})
    lines = [f"{key}: {value if isinstance(value, str | int | float) else json.dumps(value)}" for key, value in facts.items()]
    write_text(chosen.out / f"{name}.txt", "\n".join(lines) + "\n" + captured.get())


def processor() -> str:
    """Its name, as far as the system says."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    main()
