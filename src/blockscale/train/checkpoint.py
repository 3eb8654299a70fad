"""Checkpoints: folders that appear whole or not at all. The newest one is the whole state of a recipe's training.

``<out>/checkpoints/<recipe>/step-000100/`` holds ``state.json`` (configuration, losses, time), ``model.safetensors`` and, until
the recipe is finished, ``optimizer.pt`` (AdamW's moments and torch's random state); ``sha256.json`` holds their checksums.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch

STATE, MODEL, OPTIMIZER, CHECKSUMS = "state.json", "model.safetensors", "optimizer.pt", "sha256.json"
_STEP = re.compile(r"step-(\d+)")


class CheckpointError(ValueError):
    """A checkpoint cannot be used; the message names its folder."""


def publish(folder: Path, step: int, files: Mapping[str, bytes]) -> Path:
    """Write ``files`` as the checkpoint of ``step``, then drop the older ones.

    Everything goes to a temporary folder first, is flushed to the disk, and gets its name by one rename: a kill at any moment
    leaves either the previous checkpoint or this one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    final = folder / f"step-{step:06d}"
    if not final.exists():
        sums = {name: hashlib.sha256(data).hexdigest() for name, data in files.items() if name != STATE}
        temporary = Path(tempfile.mkdtemp(dir=folder, prefix=f".{final.name}.", suffix=".tmp"))
        try:
            for name, data in {**files, CHECKSUMS: json.dumps(sums, indent=1).encode()}.items():
                with open(temporary / name, "wb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            shutil.rmtree(temporary, ignore_errors=True)
            raise
        temporary.chmod(0o755)
        _flush_folder(temporary)
        temporary.rename(final)
        _flush_folder(folder)
    _drop_others(folder, final)
    return final


def newest(folder: Path) -> Path | None:
    """The checkpoint with the highest step, or None."""
    found = [(int(match.group(1)), path) for path in folder.glob("step-*") if (match := _STEP.fullmatch(path.name))]
    return max(found)[1] if found else None


def read_state(checkpoint: Path) -> dict[str, Any]:
    """The checkpoint's ``state.json``.

    Raises:
        CheckpointError: it is missing or not JSON.
    """
    try:
        state: dict[str, Any] = json.loads((checkpoint / STATE).read_text("utf-8"))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"checkpoint {checkpoint} cannot be read ({error}); remove it to start that recipe again") from error
    return state


def _checked(checkpoint: Path, name: str) -> bytes:
    """The bytes of a file, which must be those that were written."""
    data = (checkpoint / name).read_bytes()
    expected = json.loads((checkpoint / CHECKSUMS).read_text("utf-8"))[name]
    if hashlib.sha256(data).hexdigest() != expected:
        raise ValueError(f"{name} is damaged: it is not what was written")
    return data


def model_bytes(model: torch.nn.Module) -> bytes:
    """The weights as a safetensors file."""
    return safetensors.torch.save({name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()})


def optimizer_bytes(optimizer: torch.optim.Optimizer, device: torch.device) -> bytes:
    """The optimizer's state and torch's random state, which stochastic rounding draws from."""
    random = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        random["cuda"] = torch.cuda.get_rng_state(device)
    buffer = io.BytesIO()
    torch.save({"optimizer": optimizer.state_dict(), "random": random}, buffer)
    return buffer.getvalue()


def restore(checkpoint: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None, device: torch.device) -> None:
    """Load weights and, where ``optimizer`` is given, its state and torch's random state.

    Raises:
        CheckpointError: a file is missing, damaged, or of another model.
    """
    try:
        model.load_state_dict(safetensors.torch.load(_checked(checkpoint, MODEL)))
        if optimizer is not None:
            saved = torch.load(io.BytesIO(_checked(checkpoint, OPTIMIZER)), map_location="cpu", weights_only=True)
            optimizer.load_state_dict(saved["optimizer"])
            torch.set_rng_state(saved["random"]["cpu"])
            if device.type == "cuda" and "cuda" in saved["random"]:
                torch.cuda.set_rng_state(saved["random"]["cuda"], device)
    except (OSError, EOFError, RuntimeError, KeyError, TypeError, ValueError, safetensors.SafetensorError) as error:
        raise CheckpointError(
            f"checkpoint {checkpoint} cannot be loaded ({error}); remove it to start that recipe again"
        ) from error


def _flush_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _drop_others(folder: Path, keep: Path) -> None:
    """Remove older checkpoints and what killed writers left; a name goes first, so no reader sees half of one."""
    for path in folder.iterdir():
        if path == keep or not path.is_dir():
            continue
        if _STEP.fullmatch(path.name):
            path = path.rename(path.with_name(f".{path.name}.old.tmp"))
        if path.name.endswith(".tmp"):
            shutil.rmtree(path, ignore_errors=True)
