"""The formats a tensor can be quantized to: frozen dataclasses, each with a string form for the operators.

``fmt.spec()`` and :func:`parse` are inverse to each other, so a format can cross an operator schema as a string.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import lru_cache
from typing import ClassVar

from blockscale.formats.base import Format, check


@dataclass(frozen=True)
class MXFP8(Format):
    """Microscaling FP8: E4M3 or E5M2 elements, one E8M0 scale per 32 along the contraction.

    Args:
        element: "e4m3" or "e5m2".
        block: (1, 32), or (32, 32) for weights whose two planes must hold the same bytes.
        scale_rounding: "up" (smallest power of two that does not saturate) or "floor" (OCP MX v1.0).
        nan: "propagate" (a NaN makes its block NaN) or "ignore" (dropped from the block maximum, stored as 0x7F).
    """

    element: str = "e4m3"
    block: tuple[int, int] = (1, 32)
    scale_rounding: str = "up"
    nan: str = "propagate"
    columnwise_source: str = "original"
    kind: ClassVar[str] = "mxfp8"
    scale_type: ClassVar[str] = "e8m0"

    def __post_init__(self) -> None:
        super().__post_init__()
        check("element", self.element, ("e4m3", "e5m2"))
        check("block", self.block, ((1, 32), (32, 32)))
        check("scale_rounding", self.scale_rounding, ("up", "floor"))
        check("nan", self.nan, ("propagate", "ignore"))


@dataclass(frozen=True)
class MXFP4(Format):
    """Microscaling FP4: E2M1 elements, one E8M0 scale per 32 along the contraction.

    Two elements share a byte, so, unlike MXFP8's, the columnwise plane is stored transposed: its pairs lie along the
    contraction too. Rows are stored in whole blocks, 16 * ceil(K / 32) bytes; absent elements are code 0.

    Args:
        block: (1, 32), or (32, 32) for weights whose two planes must hold the same values.
        scale_rounding: "up" (smallest power of two that does not saturate) or "floor" (OCP MX v1.0).
        nan: "propagate" (a NaN gives its block the scale 0xFF) or "ignore" (dropped from the maximum, stored as 6).
    """

    block: tuple[int, int] = (1, 32)
    scale_rounding: str = "up"
    nan: str = "propagate"
    columnwise_source: str = "original"
    kind: ClassVar[str] = "mxfp4"
    element: ClassVar[str] = "e2m1"
    scale_type: ClassVar[str] = "e8m0"
    transposed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check("block", self.block, ((1, 32), (32, 32)))
        check("scale_rounding", self.scale_rounding, ("up", "floor"))
        check("nan", self.nan, ("propagate", "ignore"))


@dataclass(frozen=True)
class NVFP4(Format):
    """E2M1 elements, one E4M3 scale per 16 along the contraction and one float32 scale a tensor (or group).

    A NaN stays visible; an infinity does not: it decodes to 2688, and the global scale becomes 1.

    Args:
        block: (1, 16), or (16, 16) for weights.
        hadamard: 16-point random Hadamard transform along M before the columnwise quantization.
        stochastic: stochastic rounding of the elements (gradients); random bits from ``rng`` or ``generator`` when quantizing.
        nan: "propagate" or "ignore" (a NaN becomes +6, its block keeps its scale).
        row_scaled: one float32 scale for each row of the stored plane instead: rowwise amax (M,), columnwise (K,);
            grouped (capacity,) and (G, K). 1x16 blocks only.
        four_over_six: "mae" or "mse": each block's maximum is mapped to 4 instead of 6 where the sum of the absolute or
            squared errors is smaller. Not with hadamard or stochastic.
        scale_max: E, 448 or (with four_over_six) 256: a block scale beyond which the global scale does not go.
    """

    block: tuple[int, int] = (1, 16)
    hadamard: bool = False
    stochastic: bool = False
    nan: str = "propagate"
    row_scaled: bool = False
    four_over_six: str | None = None
    scale_max: int = 448
    columnwise_source: str = "original"
    kind: ClassVar[str] = "nvfp4"
    _later: ClassVar[tuple[str, ...]] = ("row_scaled", "four_over_six", "scale_max", "columnwise_source")
    scale_type: ClassVar[str] = "e4m3"
    element: ClassVar[str] = "e2m1"
    has_amax: ClassVar[bool] = True
    transposed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check("block", self.block, ((1, 16), (16, 16)))
        check("hadamard", self.hadamard, (False, True))
        check("stochastic", self.stochastic, (False, True))
        check("nan", self.nan, ("propagate", "ignore"))
        if self.hadamard and self.is_2d:
            raise ValueError("hadamard=True is not legal with block=(16, 16): the two planes would not agree")
        check("row_scaled", self.row_scaled, (False, True))
        if self.row_scaled and self.is_2d:
            raise ValueError("row_scaled=True is not legal with block=(16, 16): the rows of a block would need scales of their own")
        check("four_over_six", self.four_over_six, (None, "mae", "mse"))
        check("scale_max", self.scale_max, (448, 256) if self.four_over_six else (448,))
        if self.four_over_six and (self.hadamard or self.stochastic):
            raise ValueError(f"four_over_six={self.four_over_six!r} is not legal with hadamard or stochastic")

    @property
    def range(self) -> float:
        """6E, what the global amax is mapped to."""
        return 6.0 * self.scale_max


@dataclass(frozen=True)
class FP8Tensor(Format):
    """FP8 with one float32 scale a tensor (or group), taken from the tensor's own amax (current scaling).

    A NaN stays visible; an infinity does not: the scale becomes 1 and elements saturate.

    Args:
        element: "e4m3" or "e5m2".
        power_of_two: round the scale down to a power of two.
        eps: the smallest amax assumed, >= 0.
    """

    element: str = "e4m3"
    power_of_two: bool = False
    eps: float = 0.0
    columnwise_source: str = "original"
    kind: ClassVar[str] = "fp8tensor"
    per_tensor: ClassVar[bool] = True
    has_amax: ClassVar[bool] = True
    transposed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_fp8(self.element, self.power_of_two, self.eps)


@dataclass(frozen=True)
class FP8Delayed(Format):
    """FP8 with one float32 scale a tensor (or group) that earlier steps chose (delayed scaling).

    Quantizing takes the scale (``scale=``) and keeps the tensor's own amax beside the codes, for the history. After a step
    ``reference.delayed.next_scale`` makes the next scale of the history; layers do it by themselves (``bs.update_scales``).
    A NaN stays visible and enters no amax; what is beyond the scale's range saturates, infinities too.

    Args:
        element: "e4m3" or "e5m2".
        history: entries of the amax history, >= 1.
        algorithm: the amax that makes the scale: "max" of the history, or its "most_recent" entry.
        margin: the scale is divided by 2^margin; an integer in -64..64.
    """

    element: str = "e4m3"
    history: int = 1024
    algorithm: str = "max"
    margin: int = 0
    columnwise_source: str = "original"
    kind: ClassVar[str] = "fp8delayed"
    per_tensor: ClassVar[bool] = True
    has_amax: ClassVar[bool] = True
    transposed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check("element", self.element, ("e4m3", "e5m2"))
        check("algorithm", self.algorithm, ("max", "most_recent"))
        for name, value, low, high in (("history", self.history, 1, 2**20), ("margin", self.margin, -64, 64)):
            if not isinstance(value, int) or not low <= value <= high:
                raise ValueError(f"{name}={value!r} is not legal; it must be an integer in {low}..{high}")

    def stored(self, plane: str) -> Format:
        """The format that reads a plane's bytes: where the scale came from does not matter."""
        return FP8Tensor(self.element)


@dataclass(frozen=True)
class FP8Block(Format):
    """FP8 with one float32 scale per 1x128 (activations, gradients) or 128x128 (weights).

    A NaN stays visible; an infinity does not: its block's scale becomes 1 and elements saturate.

    Args:
        element: "e4m3" or "e5m2".
        block: (1, 128) or (128, 128).
        power_of_two: scales are powers of two.
        eps: the smallest amax assumed, >= 0.
    """

    element: str = "e4m3"
    block: tuple[int, int] = (1, 128)
    power_of_two: bool = True
    eps: float = 0.0
    columnwise_source: str = "original"
    kind: ClassVar[str] = "fp8block"
    transposed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check("block", self.block, ((1, 128), (128, 128)))
        _check_fp8(self.element, self.power_of_two, self.eps)


@dataclass(frozen=True)
class Hybrid(Format):
    """Rowwise plane in one format, columnwise plane in another.

    Args:
        rowwise, columnwise: the formats; what they say about the other plane is ignored.
        columnwise_source: of this pair: "original" or "rowwise_dequantized".
    """

    rowwise: Format
    columnwise: Format
    columnwise_source: str = "original"
    kind: ClassVar[str] = "hybrid"

    def __post_init__(self) -> None:
        for name, fmt in (("rowwise", self.rowwise), ("columnwise", self.columnwise)):
            if not isinstance(fmt, Format) or isinstance(fmt, Hybrid):
                raise TypeError(f"{name} is {type(fmt).__name__}; a format of one plane such as MXFP8() is needed")
            if isinstance(fmt, FP8Delayed):
                raise ValueError(f"{name} is FP8Delayed, whose scale belongs to both planes; it cannot be one of a Hybrid")
            if fmt.from_row:
                raise ValueError(f"{name} has a columnwise_source; give it to Hybrid, whose planes it relates")
        check("columnwise_source", self.columnwise_source, ("original", "rowwise_dequantized"))
        text = ";".join((self.kind, self.rowwise.spec(), self.columnwise.spec(), self.columnwise_source))
        object.__setattr__(self, "_spec", text)

    def of(self, plane: str) -> Format:
        """The format of "rowwise" or "columnwise"."""
        return self.rowwise if plane == "rowwise" else self.columnwise

    @property
    def has_codes(self) -> bool:
        """Whether both planes have scale codes, and so all layouts."""
        return self.rowwise.has_codes and self.columnwise.has_codes

    @property
    def stochastic(self) -> bool:
        """Whether a plane is rounded stochastically."""
        return any(getattr(f, "stochastic", False) for f in (self.rowwise, self.columnwise))

    @property
    def hadamard(self) -> bool:
        """Whether the columnwise plane is transformed."""
        return bool(getattr(self.columnwise, "hadamard", False))

    @property
    def label(self) -> str:
        """Both labels."""
        source = " from the row plane" if self.from_row else ""
        return f"rowwise {self.rowwise.label}, columnwise {self.columnwise.label}{source}"


def _check_fp8(element: str, power_of_two: bool, eps: float) -> None:
    check("element", element, ("e4m3", "e5m2"))
    check("power_of_two", power_of_two, (False, True))
    if not isinstance(eps, (int, float)) or not 0.0 <= eps < float("inf"):
        raise ValueError(f"eps={eps!r} is not legal; it must be finite and >= 0")


_KINDS: dict[str, type[Format]] = {cls.kind: cls for cls in (MXFP8, MXFP4, NVFP4, FP8Tensor, FP8Delayed, FP8Block)}


@lru_cache(maxsize=256)
def parse(spec: str) -> Format:
    """The format of a string made by ``Format.spec()``; a bare kind such as ``"mxfp8"`` means its defaults.

    Raises:
        ValueError: unknown kind or option, naming the legal ones.
    """
    if spec.startswith(f"{Hybrid.kind};"):
        parts = spec.split(";")
        if len(parts) != 4:
            raise ValueError(f"format {spec!r}: hybrid;ROWWISE;COLUMNWISE;SOURCE is needed")
        return Hybrid(parse(parts[1]), parse(parts[2]), parts[3])
    kind, *options = spec.split(":")
    if kind not in _KINDS:
        raise ValueError(f"format {spec!r}: kind {kind!r} is not one of {sorted(_KINDS)}")
    cls = _KINDS[kind]
    known = {f.name: f for f in fields(cls)}
    values: dict[str, object] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in known:
            raise ValueError(f"format {spec!r}: option {name!r} is not one of {sorted(known)}")
        values[name] = _read(known[name].default, text, spec)
    return cls(**values)


def _read(default: object, text: str, spec: str) -> object:
    try:
        if isinstance(default, bool):
            return {"True": True, "False": False}[text]
        if isinstance(default, (int, float)):
            return type(default)(text)
        if default is None:
            return None if text == "None" else text
        if isinstance(default, tuple):
            return tuple(int(n) for n in text.split("x"))
    except (KeyError, ValueError):
        raise ValueError(f"format {spec!r}: {text!r} is not a legal value") from None
    return text
