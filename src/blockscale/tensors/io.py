"""Files of quantized tensors: safetensors, with the formats and extents in the header; torch.save works as it is."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from blockscale.formats import MXFP4, MXFP8, NVFP4, FP8Block, FP8Tensor, Hybrid, parse
from blockscale.layouts import PLANES, GroupExtent
from blockscale.tensors.tensor import BlockScaledTensor, GroupedTensor, Plane

_KEY = "blockscale"

torch.serialization.add_safe_globals(
    [BlockScaledTensor, GroupedTensor, Plane, GroupExtent, MXFP8, MXFP4, NVFP4, FP8Tensor, FP8Block, Hybrid]
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
        entry: dict[str, object] = {"format": tensor.format.spec(), "shape": tensor.shape, "layouts": {}}
        entry["layouts"] = {plane: p.layout for plane, p in tensor.planes.items()}
        for plane, p in tensor.planes.items():
            flat |= {f"{name}.{plane}.{part}": t for part in ("data", "scale", "amax") if (t := getattr(p, part)) is not None}
        if isinstance(tensor, GroupedTensor):
            flat[f"{name}.offsets"] = tensor.offsets
            entry["matrix_rows"] = tensor.matrix_rows
        elif tensor.extent is not None:
            entry["extent"] = asdict(tensor.extent)
        header[name] = entry
    storages = {t.untyped_storage().data_ptr() for t in flat.values()}
    shared = len(storages) < len(flat)  # the file format has no shared tensors: each gets its own bytes
    flat = {key: t.clone(memory_format=torch.contiguous_format) if shared else t.contiguous() for key, t in flat.items()}
    target = Path(path)
    handle, temporary = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    os.close(handle)
    try:
        save_file(flat, temporary, metadata={_KEY: json.dumps(header)})
        os.replace(temporary, target)
    except BaseException:
        os.unlink(temporary)
        raise


def load(path: str | os.PathLike[str], device: str = "cpu") -> dict[str, BlockScaledTensor | GroupedTensor]:
    """Read what :func:`save` wrote.

    Raises:
        ValueError: not a safetensors file, or one without blockscale metadata.
    """
    try:
        with safe_open(path, framework="pt", device=device) as f:
            metadata = f.metadata() or {}
            flat = {key: f.get_tensor(key) for key in f.keys()}  # noqa: SIM118  (not a dict)
    except SafetensorError as error:
        raise ValueError(f"path={str(path)!r} is not a safetensors file: {error}") from None
    if _KEY not in metadata:
        raise ValueError(f"path={str(path)!r} has no {_KEY!r} metadata: it was not written by blockscale.save")
    result: dict[str, BlockScaledTensor | GroupedTensor] = {}
    for name, entry in json.loads(metadata[_KEY]).items():
        planes: dict[str, Plane | None] = dict.fromkeys(PLANES)
        for plane, layout in entry["layouts"].items():
            key = f"{name}.{plane}"
            planes[plane] = Plane(flat[f"{key}.data"], flat[f"{key}.scale"], flat.get(f"{key}.amax"), layout)
        shape, fmt = (entry["shape"][0], entry["shape"][1]), parse(entry["format"])
        if f"{name}.offsets" in flat:
            offsets, rows = flat[f"{name}.offsets"], entry["matrix_rows"]
            result[name] = GroupedTensor(shape, fmt, planes["rowwise"], planes["columnwise"], offsets, rows)
        else:
            extent = GroupExtent(**entry["extent"]) if "extent" in entry else None
            result[name] = BlockScaledTensor(shape, fmt, planes["rowwise"], planes["columnwise"], extent)
    return result
