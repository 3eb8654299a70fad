"""Files of quantized tensors: safetensors, with the formats and extents in the header; torch.save works as it is."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, NVFP4, FP8Block, FP8Delayed, FP8Tensor, Hybrid, parse
from blockscale.layouts import PLANES, GroupExtent
from blockscale.tensors.shapes import amax_shape, grouped_plane_shapes, plane_shapes, scale_dtype
from blockscale.tensors.tensor import BlockScaledTensor, GroupedTensor, Plane

_KEY = "blockscale"

torch.serialization.add_safe_globals(
    [BlockScaledTensor, GroupedTensor, Plane, GroupExtent, MXFP8, MXFP4, NVFP4, FP8Tensor, FP8Delayed, FP8Block, Hybrid]
)


def save(tensors: Mapping[str, BlockScaledTensor | GroupedTensor], path: str | os.PathLike[str]) -> None:
    """Write quantized tensors to a safetensors file (to a temporary name, then renamed).

    Each plane becomes ``NAME.rowwise.data``, ``NAME.rowwise.scale``, ``NAME.rowwise.amax`` and so on; formats, shapes and
    layouts stand in the file's metadata under "blockscale" as JSON.

    Raises:
        TypeError: a value that is not a BlockScaledTensor or GroupedTensor.
    """
    flat: dict[str, Tensor] = {}
    header: dict[str, object] = {}
    for name, tensor in tensors.items():
        if not isinstance(tensor, (BlockScaledTensor, GroupedTensor)):
            raise TypeError(f"tensors[{name!r}] is {type(tensor).__name__}; BlockScaledTensor or GroupedTensor is needed")
        entry: dict[str, object] = {"format": tensor.format.spec(), "shape": tensor.shape, "layouts": {}, "grouped": False}
        entry["layouts"] = {plane: p.layout for plane, p in tensor.planes.items()}
        for plane, p in tensor.planes.items():
            flat |= {f"{name}.{plane}.{part}": t for part in ("data", "scale", "amax") if (t := getattr(p, part)) is not None}
        if isinstance(tensor, GroupedTensor):
            flat[f"{name}.offsets"] = tensor.offsets
            entry |= {"grouped": True, "matrix_rows": tensor.matrix_rows}
        elif tensor.extent is not None:
            entry["extent"] = asdict(tensor.extent)
        header[name] = entry
    storages = {t.untyped_storage().data_ptr() for t in flat.values()}
    shared = len(storages) < len(flat)  # the file format has no shared tensors: each gets its own bytes
    flat = {key: t.clone(memory_format=torch.contiguous_format) if shared else t.contiguous() for key, t in flat.items()}
    target = Path(path)
    if target.exists() and not target.is_file():
        raise ValueError(f"path={str(path)!r} exists and is no regular file; it will not be replaced")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"path={str(path)!r}: there is no folder {str(target.parent)!r}")
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as folder:
        temporary = Path(folder) / target.name
        save_file(flat, temporary, metadata={_KEY: json.dumps(header)})
        usual = Path(folder) / "mode"
        usual.touch()
        shutil.copymode(usual, temporary)  # safetensors leaves its files to their owner alone
        os.replace(temporary, target)


def load(path: str | os.PathLike[str], device: str | torch.device = "cpu") -> dict[str, BlockScaledTensor | GroupedTensor]:
    """Read what :func:`save` wrote.

    Raises:
        ValueError: not a safetensors file, one without blockscale metadata, or one whose tensors do not fit it; the message
            names the path and the tensor.
        OSError: the file cannot be read.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"path={str(path)!r} is no file")
    target = torch.device(device)
    try:
        with safe_open(path, framework="pt") as f:
            metadata = f.metadata() or {}
            flat = {key: f.get_tensor(key).to(target) for key in f.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"path={str(path)!r} is not a safetensors file: {error}") from None
    if _KEY not in metadata:
        raise ValueError(f"path={str(path)!r} has no {_KEY!r} metadata: it was not written by blockscale.save")
    result: dict[str, BlockScaledTensor | GroupedTensor] = {}
    name = ""
    try:
        for name, entry in json.loads(metadata[_KEY]).items():
            result[name] = _read(name, entry, flat)
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        what = f"missing {error}" if isinstance(error, KeyError) else str(error)
        raise ValueError(f"path={str(path)!r} is damaged at tensor {name!r}: {what}") from error
    return result


def _read(name: str, entry: dict[str, Any], flat: Mapping[str, Tensor]) -> BlockScaledTensor | GroupedTensor:
    fmt = parse(entry["format"])
    M, K = (int(n) for n in entry["shape"])
    planes: dict[str, Plane | None] = dict.fromkeys(PLANES)
    offsets = flat[f"{name}.offsets"] if entry["grouped"] else None
    if offsets is not None:
        _check_offsets(offsets, M)
    for which, layout in entry["layouts"].items():
        key, own = f"{name}.{which}", fmt.of(which)
        plane = Plane(flat[f"{key}.data"], flat[f"{key}.scale"], flat[f"{key}.amax"] if own.has_amax else None, layout)
        G = None if offsets is None else offsets.numel() - 1
        shapes = plane_shapes(own, M, K, which, layout) if G is None else grouped_plane_shapes(own, M, K, G, which, layout)
        for part, expected in zip(("data", "scale", "amax"), (*shapes, amax_shape(own, which, M, K, G)), strict=True):
            t = getattr(plane, part)
            if t is not None and tuple(t.shape) != expected:
                raise ValueError(f"{which} {part} has shape {tuple(t.shape)}; {expected} is needed")
        if plane.data.dtype != torch.uint8 or plane.scale.dtype != scale_dtype(own):
            raise ValueError(f"{which} is {plane.data.dtype} with {plane.scale.dtype} scales; uint8, {scale_dtype(own)} are needed")
        planes[which] = plane
    if offsets is not None:
        return GroupedTensor((M, K), fmt, planes["rowwise"], planes["columnwise"], offsets, entry["matrix_rows"])
    extent = GroupExtent(**entry["extent"]) if "extent" in entry else None
    return BlockScaledTensor((M, K), fmt, planes["rowwise"], planes["columnwise"], extent)


def _check_offsets(offsets: Tensor, capacity: int) -> None:
    """``ValueError`` unless stored offsets start at 0, never decrease and end within the capacity."""
    values = offsets.tolist()
    if offsets.dtype != torch.int64 or not values or values[0] != 0 or values != sorted(values) or values[-1] > capacity:
        raise ValueError(f"offsets {values[:8]} are not those of {capacity} rows")
