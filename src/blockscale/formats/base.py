"""What the formats have in common."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import ClassVar


def check(name: str, value: object, legal: tuple[object, ...]) -> None:
    """``ValueError`` unless ``value`` is one of ``legal``, naming all three."""
    if value not in legal:
        raise ValueError(f"{name}={value!r} is not legal; it must be one of {', '.join(map(repr, legal))}")


@dataclass(frozen=True)
class Format:
    """What all formats have in common; not to be made directly.

    Each has ``columnwise_source``: "original" quantizes the columnwise plane from the tensor, "rowwise_dequantized" from
    the float32 values of the rowwise plane, so that both planes stand for nearly the same numbers.
    """

    kind: ClassVar[str]
    _spec: ClassVar[str]
    #: options that came later: they stand in the text only when they differ from the default, so that old texts stay the same
    _later: ClassVar[tuple[str, ...]] = ("columnwise_source",)
    #: type of the block scales: "e8m0" and "e4m3" are codes with layouts, "float32" is not
    scale_type: ClassVar[str] = "float32"
    #: whether planes carry a global amax
    has_amax: ClassVar[bool] = False
    #: whether the only scales are one float32 a tensor (or group)
    per_tensor: ClassVar[bool] = False
    #: whether the columnwise plane is stored transposed, (K, M)
    transposed: ClassVar[bool] = False

    @property
    def packed(self) -> bool:
        """Whether two elements share a byte (E2M1); a row is then stored in whole blocks."""
        return self.element_name == "e2m1"

    @property
    def has_codes(self) -> bool:
        """Whether block scales are one-byte codes, which have layouts."""
        return self.scale_type != "float32"

    @property
    def scales_rows(self) -> bool:
        """Whether each row of the stored plane has a global scale of its own."""
        return bool(getattr(self, "row_scaled", False))

    @property
    def is_2d(self) -> bool:
        """Whether a scale belongs to a square block, the same in both planes."""
        block = getattr(self, "block", (1, 1))
        return bool(block[0] > 1)

    @property
    def block_length(self) -> int:
        """Elements along the contraction that share a scale (0: all)."""
        return int(getattr(self, "block", (0, 0))[1])

    @property
    def element_name(self) -> str:
        """Name of the element type, whether the format has a choice of it or not."""
        return str(getattr(self, "element"))  # noqa: B009  (a field of some formats, a constant of others)

    @property
    def label(self) -> str:
        """A short name for tables, such as ``MXFP8 E4M3 1x32``: what differs from the defaults is named."""
        block = getattr(self, "block", None)
        parts = [type(self).__name__, self.element_name.upper(), *(["x".join(map(str, block))] if block else [])]
        shown = {"element", "block"}
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in shown and value != f.default:
                parts.append(f.name if value is True else f"{f.name}={value}")
        return " ".join(parts)

    def spec(self) -> str:
        """The string form, such as ``mxfp8:element=e4m3:block=1x32:scale_rounding=up:nan=propagate``."""
        return self._spec

    def of(self, plane: str) -> Format:
        """The format of a plane: of all but :class:`Hybrid`, this one."""
        return self

    def stored(self, plane: str) -> Format:
        """The format that reads a plane's bytes: without what only says how they were made."""
        own = self.of(plane)
        return replace(own, columnwise_source="original") if own.from_row else own  # type: ignore[call-arg]

    @property
    def from_row(self) -> bool:
        """Whether the columnwise plane is quantized from the values of the rowwise one instead of from the tensor."""
        return bool(getattr(self, "columnwise_source", "original") == "rowwise_dequantized")

    def __post_init__(self) -> None:
        """Make the text once: torch.compile would take the numbers of a second format for symbolic sizes as it traced this."""
        parts = [self.kind]
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name not in self._later or value != f.default:
                parts.append(f"{f.name}={'x'.join(map(str, value)) if isinstance(value, tuple) else value}")
        object.__setattr__(self, "_spec", ":".join(parts))
        check("columnwise_source", getattr(self, "columnwise_source", "original"), ("original", "rowwise_dequantized"))
        if self.from_row and self.is_2d:
            raise ValueError("columnwise_source='rowwise_dequantized' is for blocks of one row; a square block serves both planes")
