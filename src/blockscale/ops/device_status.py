"""What kernels found wrong in values that only the device knows, told on the host without waiting for the device.

A kernel that reads such values stays within its buffers whatever they are, and leaves what was wrong in a few words of pinned
host memory. Each later operator of blockscale looks at the first of them (a read of host memory) and raises; so does
:func:`check`, which waits for the devices first. The words: kernel (0: nothing is wrong), group, offsets[group],
offsets[group + 1], rows of the buffer.
"""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor

WORDS = 8
#: who may have written: ids that the kernels know, see ``kernels.extent.check_offsets``
KERNELS = {
    1: "quantize_mxfp8",
    2: "quantize_nvfp4",
    3: "quantize_fp8_block",
    4: "quantize_fp8_tensor",
    5: "activation",
    6: "dequantize",
}


class DeviceCheckError(RuntimeError):
    """A value on the device was not legal. The results of the call that read it are not to be used; nothing else was harmed."""


class _Words:
    """The words of each device."""

    def __init__(self) -> None:
        self.tensors: dict[torch.device, Tensor] = {}
        self.views: list[Any] = []  # the same memory for numpy, whose reads are cheap
        self.lock = threading.Lock()

    def of(self, device: torch.device) -> Tensor:
        with self.lock:
            if device not in self.tensors:
                words = torch.zeros(WORDS, dtype=torch.int64, pin_memory=device.type == "cuda")
                self.tensors[device] = words
                self.views.append(words.numpy())
            return self.tensors[device]


_words = _Words()


def words(device: torch.device) -> Tensor:
    """int64 (WORDS,) on the host, which kernels on ``device`` write to: the last argument of those that check."""
    return _words.of(device)


def raise_pending() -> None:
    """Raise what a kernel has left, if one has.

    Raises:
        DeviceCheckError: naming the kernel, the group, its values and what is legal.
    """
    for view in _words.views:
        if view[0]:
            _raise()


def check() -> None:
    """Wait for every device that blockscale runs on, and raise what its kernels found wrong.

    Kernels read offsets and ids on the device and never wait for the host, so a wrong one is told by a later call; this tells
    at once. ``compute-sanitizer`` sees nothing of it: kernels stay within their buffers whatever the values are.

    Raises:
        DeviceCheckError: naming the kernel, the group, its values and what is legal.
    """
    for device in _words.tensors:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    raise_pending()


def _raise() -> None:
    device, tensor = next((d, t) for d, t in _words.tensors.items() if t[0])
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # the words behind the first one have arrived
    kernel, group, start, end, capacity = tensor[:5].tolist()
    tensor.zero_()
    raise DeviceCheckError(f"{KERNELS.get(kernel, 'a kernel')} on {device}: {_in_words(group, start, end, capacity)}")


def _in_words(group: int, start: int, end: int, capacity: int) -> str:
    if group == 0 and start != 0:
        return f"offsets[0]={start}; offsets start at 0"
    if end < start:
        return (
            f"offsets decrease at group {group}: offsets[{group}]={start}, offsets[{group + 1}]={end}; "
            "each must be at least the one before (a group's size is not negative)"
        )
    return f"offsets[{group + 1}]={end}: the sizes sum to more than the {capacity} rows of the buffer"
