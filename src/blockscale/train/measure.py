"""Two things measured on one batch at the initial weights: what quantization does to the gradients, and what is saved."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch.autograd.graph import saved_tensors_hooks

import blockscale as bs
from blockscale.train.model import Transformer

SAVED_BYTES_METHOD = (
    "saved_tensors_hooks around each MoE layer: distinct storages that autograd holds for backward, "
    "parameters left out, quantized copies of weights counted"
)


@dataclass(frozen=True)
class Measurement:
    """``gradient_error``: relative Frobenius error of all expert weight gradients together; ``gradient_errors``: each one's."""

    gradient_error: float
    gradient_errors: dict[str, float]
    saved_bytes: int


@dataclass
class SavedBytes:
    """Storages seen by the hooks: address -> bytes. ``kept`` holds them alive, so that no address comes twice."""

    storages: dict[int, int] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)

    @property
    def total(self) -> int:
        """Bytes of all distinct storages."""
        return sum(self.storages.values())


@contextmanager
def count_saved_bytes(model: Transformer) -> Iterator[SavedBytes]:
    """Count what the MoE layers of ``model`` save for backward in forward passes inside the context."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    saved = SavedBytes()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in parameters:
            saved.storages[storage.data_ptr()] = storage.nbytes()
            saved.kept.append(tensor.detach())
        return tensor

    def hooked(layer: torch.nn.Module) -> None:
        forward = layer.forward

        def with_hooks(x: torch.Tensor) -> object:
            with saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(x)

        layer.__dict__["forward"] = with_hooks

    layers = model.moe_layers()
    for layer in layers:
        hooked(layer)
    try:
        yield saved
    finally:
        for layer in layers:
            del layer.__dict__["forward"]


def expert_gradients(
    model: Transformer, batch: tuple[torch.Tensor, torch.Tensor], recipe: bs.recipes.Recipe
) -> tuple[dict[str, torch.Tensor], int]:
    """(gradients of the experts' weights by parameter name, bytes the MoE layers saved for backward) of one batch."""
    model.zero_grad(set_to_none=True)
    with count_saved_bytes(model) as saved, bs.autocast(recipe):
        loss, aux_loss = model.loss(*batch)
    (loss + aux_loss).backward()
    gradients = {
        name: parameter.grad.detach().clone()
        for name, parameter in model.named_parameters()
        if ".moe.experts." in name and parameter.grad is not None
    }
    model.zero_grad(set_to_none=True)
    return gradients, saved.total


def compare(gradients: dict[str, torch.Tensor], baseline: dict[str, torch.Tensor], saved_bytes: int) -> Measurement:
    """||g - g_baseline|| / ||g_baseline|| over everything and per parameter, in float64."""
    squares = {
        name: (
            (gradients[name].double() - reference.double()).square().sum().item(),
            reference.double().square().sum().item(),
        )
        for name, reference in baseline.items()
    }
    errors = {name: (error / norm) ** 0.5 if norm else float("nan") for name, (error, norm) in squares.items()}
    error, norm = (sum(pair[index] for pair in squares.values()) for index in (0, 1))
    return Measurement((error / norm) ** 0.5 if norm else float("nan"), errors, saved_bytes)


def weights_sha256(model: torch.nn.Module) -> str:
    """A digest of every tensor of the state dict, by name."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
