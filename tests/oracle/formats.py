"""One entry for all formats: a name and its options, as the package's constructors take them."""

from dataclasses import dataclass, field

import numpy as np

from . import fp8, layouts, mxfp4, mxfp8, nvfp4
from .blocks import Plane

PLANES = ("rowwise", "columnwise")


@dataclass(frozen=True)
class Format:
    """name "MXFP8", "MXFP4", "NVFP4", "FP8Tensor" or "FP8Block", and the constructor's options."""

    name: str
    options: dict = field(default_factory=dict)

    def __str__(self) -> str:
        return "-".join([self.name] + [f"{k}={v}".replace(" ", "") for k, v in self.options.items()])

    @property
    def mx(self) -> bool:
        """MXFP8: its columnwise plane is not transposed."""
        return self.name == "MXFP8"

    @property
    def has_amax(self) -> bool:
        """NVFP4 and FP8Tensor take and hold an amax."""
        return self.name in ("NVFP4", "FP8Tensor")

    @property
    def has_codes(self) -> bool:
        """MXFP8, MXFP4 and NVFP4: uint8 scales with layouts."""
        return self.name in ("MXFP8", "MXFP4", "NVFP4")

    @property
    def packed(self) -> bool:
        """MXFP4 and NVFP4: two elements a byte, rows in whole blocks."""
        return self.name in ("MXFP4", "NVFP4")

    @property
    def length(self) -> int:
        """Elements of a block along the contraction (FP8Tensor: none)."""
        return {"MXFP8": 32, "MXFP4": 32, "NVFP4": 16, "FP8Block": 128}[self.name]

    def option(self, name: str, default: object) -> object:
        """An option or its default."""
        return self.options.get(name, default)


def quantize(x: np.ndarray, fmt: Format, **extra: object) -> dict[str, Plane]:
    """Both planes of x (M, K) float32. extra: amax (NVFP4, FP8Tensor), rng and group (NVFP4)."""
    function = {
        "MXFP8": mxfp8.quantize,
        "MXFP4": mxfp4.quantize,
        "NVFP4": nvfp4.quantize,
        "FP8Tensor": fp8.quantize_tensor,
        "FP8Block": fp8.quantize_block,
    }[fmt.name]
    options = {name: value for name, value in fmt.options.items() if name != "columnwise_source"}
    planes = function(np.asarray(x, dtype=np.float32), **options, **extra)
    if fmt.option("columnwise_source", "original") == "rowwise_dequantized":
        seen = dequantize(planes["rowwise"], fmt, "rowwise", x.shape)
        planes["columnwise"] = function(seen, **options, **extra)["columnwise"]
    return planes


def scale_buffer(plane: Plane, fmt: Format, which: str, layout: str) -> np.ndarray:
    """The scale as the package stores it in a plain tensor."""
    if not fmt.has_codes:
        return plane.scale
    return layouts.arrange(plane.scale, layout, fmt.mx and which == "columnwise")


def dequantize(plane: Plane, fmt: Format, which: str, shape: tuple[int, int]) -> np.ndarray:
    """float32 (M, K)."""
    element = {"element": fmt.option("element", "e4m3")}
    if fmt.name == "MXFP8":
        return mxfp8.dequantize(plane, which, shape, **element)
    if fmt.name == "MXFP4":
        return mxfp4.dequantize(plane, which, shape)
    if fmt.name == "NVFP4":
        return nvfp4.dequantize(plane, which, shape, fmt.option("scale_max", 448))
    if fmt.name == "FP8Tensor":
        return fp8.dequantize_tensor(plane, which, shape, **element)
    return fp8.dequantize_block(plane, which, shape, **element, block=fmt.option("block", (1, 128)))
