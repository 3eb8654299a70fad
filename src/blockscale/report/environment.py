"""What a result depends on besides its configuration: versions, device, threads. No host names, no paths."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

import torch


def package_version(name: str) -> str | None:
    """The installed version of ``name``, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def describe_environment(device: torch.device) -> dict[str, str]:
    """Names and values for a report's environment table."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        described = f"{torch.cuda.get_device_name(device)} (compute capability {major}.{minor})"
    else:
        described = f"{device.type} ({platform.machine()}, {torch.backends.cpu.get_cpu_capability()})"
    return {
        "device": described,
        "threads": str(torch.get_num_threads()),
        "blockscale": package_version("blockscale") or "not installed",
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
    }
