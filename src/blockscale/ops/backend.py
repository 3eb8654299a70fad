"""Which implementation runs an operator on a device, and why."""

from __future__ import annotations

from dataclasses import dataclass

import torch

#: what each kind of stage runs in the reference backend
_REFERENCE = {
    "quantize": "blockscale.reference.quantize",
    "gemm": "blockscale.reference.grouped_gemm",
    "activation": "blockscale.reference.activations",
    "reduce": "blockscale.reference.grouped_gemm",
    "routing": "blockscale.reference.routing",
}


@dataclass(frozen=True)
class Choice:
    """A backend, its kernel, the reason, and the bytes of workspace that it is handed."""

    backend: str
    kernel: str
    why: str
    workspace_bytes: int


def choose(stage: str, device: torch.device) -> Choice:
    """The implementation of a kind of stage ("quantize", "gemm", "activation", "reduce", "routing") on ``device``."""
    why = "the only backend for the CPU: plain torch, temporaries from torch's allocator, freed on return"
    if device.type != "cpu":
        why = f"no {device.type} kernel yet: plain torch on the device"
        if stage in ("gemm", "reduce"):
            why += "; reads the offsets on the host, so it syncs and cannot be captured"
    return Choice("reference", _REFERENCE[stage], why, 0)
