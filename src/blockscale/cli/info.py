"""``blockscale info``: versions, devices, formats, recipes, backends."""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from blockscale import formats
from blockscale.cli._shared import consoles, print_json
from blockscale.ops.backend import choose
from blockscale.report import Column, Table, describe_environment, table_to_rich
from blockscale.report.environment import package_version
from blockscale.train import CHOICES

_PACKAGES = ("blockscale", "torch", "triton", "safetensors", "matplotlib")
#: each kind of format, then options that other kernels serve
_FORMATS: tuple[formats.Format, ...] = (
    formats.MXFP8(),
    formats.MXFP4(),
    formats.NVFP4(),
    formats.FP8Tensor(),
    formats.FP8Delayed(),
    formats.FP8Block(),
    formats.Hybrid(formats.NVFP4(), formats.MXFP8()),
)
_VARIANTS: tuple[formats.Format, ...] = (
    formats.NVFP4(row_scaled=True),
    formats.NVFP4(four_over_six="mae"),
    formats.MXFP8(columnwise_source="rowwise_dequantized"),
)


def info(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document instead of tables.")] = False,
) -> None:
    """Show versions, devices, formats, recipes and backends: what a bug report should hold."""
    found = _collect()
    if as_json:
        print_json(found)
        return
    console, _ = consoles()
    for title, items in found.items():
        rows = [{"name": name, "value": value} for name, value in items.items()]
        columns = (Column("name", "name", align="left"), Column("value", "value", align="left"))
        console.print(table_to_rich(Table(title, columns, rows)))


def _backends(device: torch.device) -> str:
    """``"gemm: reference (why)"`` for each kind of stage, those with the same answer together."""
    stages: dict[str, list[str]] = {}
    for stage in ("quantize", "gemm", "activation", "reduce", "routing"):
        choice = choose(stage, device)
        stages.setdefault(f"{choice.backend} ({choice.why})", []).append(stage)
    return "; ".join(f"{', '.join(names)}: {answer}" for answer, names in stages.items())


def _formats_served(device: torch.device) -> str:
    """``"cpu: MXFP8 ..., NVFP4 ...; reference: MXFP4 ..."``: what quantizes each format."""
    served: dict[str, list[str]] = {}
    for fmt in (*(f for f in _FORMATS if not isinstance(f, formats.Hybrid)), *_VARIANTS):
        served.setdefault(choose("quantize", device, fmt).backend, []).append(fmt.label)
    return "; ".join(f"{backend}: {', '.join(labels)}" for backend, labels in served.items())


def _collect() -> dict[str, dict[str, Any]]:
    """Section -> name -> value; the same for people and machines."""
    cuda = {f"cuda:{index}": describe_environment(torch.device("cuda", index)) for index in range(torch.cuda.device_count())}
    environment = describe_environment(torch.device("cpu"))
    return {
        "versions": {"python": environment["python"], **{name: package_version(name) for name in _PACKAGES}},
        "devices": {
            "cpu": f"{environment['device']}, {environment['threads']} threads",
            **{name: described["device"] for name, described in cuda.items()},
        },
        "formats": {type(fmt).__name__: fmt.spec() for fmt in _FORMATS},
        "recipes": {name: choice.make().spec() for name, choice in CHOICES.items()},
        "backends": {device: _backends(torch.device(device)) for device in ("cpu", *cuda)},
        "quantizers": {device: _formats_served(torch.device(device)) for device in ("cpu", *cuda)},
    }
