"""What is wrong in a step: the first NaN, the first infinity, values past a limit; and how a person reads it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from blockscale.tensors.counters import FIELDS, INDEX
from blockscale.watching.slots import Slot, Snapshot

#: what each role is
ROLES = {
    "input": "the layer's input",
    "weight": "its weight",
    "weight1": "the weight of the first product",
    "hidden": "the pre-activation h = x W1^T + b1",
    "activation": "act(h) times the router's probability, the input of the second product",
    "weight2": "the weight of the second product",
    "output": "the layer's output",
    "gradient": "the gradient of the layer's output",
    "da": "the gradient of the activation's result, dy W2",
    "dh": "the gradient of the pre-activation",
    "dx": "the gradient of the layer's input",
    "dw": "the gradient of the weight",
    "dw1": "the gradient of the weight of the first product",
    "dw2": "the gradient of the weight of the second product",
}
#: number of a tensor in a step: counts of elements, shares of elements, the largest magnitude, log2 of the scales' ratio
METRICS = ("nan", "inf", "saturated", "underflow", "amax", "spread")


#: looked at only in the steps that ``every`` names: a NaN in a weight shows in what it multiplies, one in a weight's gradient
#: in what it comes from
RARE = frozenset({"weight", "weight1", "weight2", "dw", "dw1", "dw2"})


@dataclass(frozen=True)
class Finding:
    """Something wrong in a tensor.

    Attributes:
        kind: "nan", "inf", or a metric past its limit.
        step, layer, role, rank: where.
        expert: the first expert (group) of it; None for a tensor that has no groups.
        experts: all of them, and ``groups``: of how many.
        value: elements (nan, inf), or the metric's value. limit: what it must not exceed.
        elements: how many were looked at. before: (layer, role) of the tensor that was seen just before it, which is clean.
        trail: (layer, role) of the tensors that had it after this one in the step, in order.
    """

    kind: str
    step: int
    layer: str
    role: str
    expert: int | None
    experts: tuple[int, ...]
    groups: int
    value: float
    limit: float
    elements: int
    before: tuple[str, str] | None
    trail: tuple[tuple[str, str], ...]
    rank: int

    def __str__(self) -> str:
        name = {"nan": "NaN", "inf": "Inf"}.get(self.kind, self.kind)
        where = f"step {self.step}, layer {self.layer}, role {self.role}"
        if self.expert is not None:
            more = f" (and {', '.join(map(str, self.experts[1:9]))})" if len(self.experts) > 1 else ""
            where += f", expert {self.expert}{more} of {self.groups}"
        number = f"{self.value:,.0f} of {self.elements:,} elements" if self.kind in ("nan", "inf") else f"{self.value:.4g}"
        past = "" if self.kind in ("nan", "inf") else f", limit {self.limit:g}"
        rank = f", rank {self.rank}" if self.rank else ""
        return f"first {name}: {where}{rank}: {number}{past}; {self.role} is {ROLES.get(self.role, 'a tensor')}"


def measure(rows: Tensor, full: bool) -> Tensor:
    """float64 (R, METRICS) of rows of counters; NaN where the scales were not looked at, or there are none."""
    r = dict(zip(FIELDS, rows.unbind(1), strict=True))
    unknown = torch.full_like(r["nans"], torch.nan)
    shares = [unknown, unknown, unknown]
    if full:
        scaled, elements = r["blocks"] > 0, r["elements"].clamp(min=1)
        spread = (r["scale_max"] / -r["scale_min"]).log2()
        shares = [torch.where(scaled, r[name] / elements, torch.nan) for name in ("saturated", "underflow")]
        shares.append(torch.where(scaled & spread.isfinite(), spread, torch.nan))
    return torch.stack((r["nans"], r["infs"], *shares[:2], r["amax"], shares[2]), 1)


def find_first(snapshot: Snapshot, totals: Tensor, kind: str, rank: int) -> Finding | None:
    """The first NaN ("nan") or infinity ("inf") of a step, in the order in which its tensors were seen."""
    field, first = INDEX[f"{kind}s"], INDEX[f"first_{kind}"]
    bad = (totals[:, field] > 0).nonzero()[:, 0].tolist()
    if not bad:
        return None
    bad.sort(key=lambda i: -float(totals[i, first]))
    slot, call = snapshot.slots[bad[0]][0], -float(totals[bad[0], first])
    earlier = [s for s, seen in snapshot.slots if seen < call and s is not slot]
    groups = (snapshot.rows(slot)[:, field] > 0).nonzero()[:, 0].tolist()
    trail = tuple((snapshot.slots[i][0].layer, snapshot.slots[i][0].role) for i in bad[1:])
    count, elements = int(totals[bad[0], field]), int(totals[bad[0], INDEX["elements"]])
    return _finding(kind, snapshot.step, slot, groups, elements, count, 0.0, earlier, trail, rank)


def find_past(snapshot: Snapshot, metric: str, limit: float, rank: int) -> Finding | None:
    """The first tensor of a step whose metric exceeds a limit, in any of its groups."""
    for slot, _ in snapshot.slots:
        rows = snapshot.rows(slot)
        values = measure(rows, snapshot.full)[:, METRICS.index(metric)]
        groups = (values > limit).nonzero()[:, 0].tolist()
        if groups:
            elements = int(rows[:, INDEX["elements"]].sum())
            return _finding(metric, snapshot.step, slot, groups, elements, float(values[groups].max()), limit, [], (), rank)
    return None


def _finding(
    kind: str,
    step: int,
    slot: Slot,
    groups: list[int],
    elements: int,
    value: float,
    limit: float,
    earlier: list[Slot],
    trail: tuple[tuple[str, str], ...],
    rank: int,
) -> Finding:
    before = (earlier[-1].layer, earlier[-1].role) if earlier else None
    expert = groups[0] if slot.groups > 1 else None
    where = (expert, tuple(groups) if slot.groups > 1 else (), slot.groups)
    return Finding(kind, step, slot.layer, slot.role, *where, value, limit, elements, before, trail, rank)
