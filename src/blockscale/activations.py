"""The activations between the two linears of an expert: frozen dataclasses, each with a string form for operators.

``act.spec()`` and :func:`parse` are inverse to each other. What each one computes, in which order of roundings, is
in :mod:`blockscale.reference.activations`; how the two halves of a GLU lie in memory (``interleave``) is no part of
the activation and is passed beside it.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from functools import lru_cache
from typing import ClassVar


@dataclass(frozen=True)
class Activation:
    """What all activations have in common; not to be made directly."""

    kind: ClassVar[str]
    #: whether the pre-activation holds two columns per output column: a (gate, activated) and b (linear)
    is_glu: ClassVar[bool]

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}={value!r} is a {type(value).__name__}; a float is needed")
            if not math.isfinite(value):
                raise ValueError(f"{name}={value!r} is not legal; it must be finite")

    def spec(self) -> str:
        """The string form, such as ``clamped_swiglu:limit=7.0:alpha=1.702:offset=1.0``."""
        return ":".join([self.kind, *(f"{name}={float(value)!r}" for name, value in asdict(self).items())])

    def pre_width(self, intermediate: int) -> int:
        """Columns of the pre-activation (the first linear's output) that give ``intermediate`` columns."""
        return 2 * intermediate if self.is_glu else intermediate

    def out_width(self, columns: int, interleave: int | None = None) -> int:
        """Columns of the result for a pre-activation of ``columns`` columns; the inverse of :meth:`pre_width`.

        Raises:
            TypeError: ``interleave`` is no int.
            ValueError: ``interleave`` without a GLU or below 1; ``columns`` not a multiple of 2 (of 2*interleave).
        """
        if not self.is_glu:
            if interleave is not None:
                raise ValueError(f"interleave={interleave} is not legal with {self.kind}, which is no GLU; use None")
            return columns
        if interleave is not None and (not isinstance(interleave, int) or isinstance(interleave, bool)):
            raise TypeError(f"interleave={interleave!r} is {type(interleave).__name__}; an int or None is needed")
        if interleave is not None and interleave < 1:
            raise ValueError(f"interleave={interleave} is not legal; it must be None or at least 1")
        unit = 2 * (interleave or 1)
        if columns % unit:
            raise ValueError(f"h has {columns} columns; {self.kind} with interleave={interleave} needs a multiple of {unit}")
        return columns // 2


@dataclass(frozen=True)
class Swiglu(Activation):
    """``a * sigmoid(a) * b``."""

    kind: ClassVar[str] = "swiglu"
    is_glu: ClassVar[bool] = True


@dataclass(frozen=True)
class ClampedSwiglu(Activation):
    """``a' * sigmoid(alpha * a') * b'`` with ``a' = min(a, limit)`` and ``b' = clamp(b, -limit, limit) + offset``.

    Args:
        limit: bound of the inputs, > 0.
        alpha: steepness of the sigmoid, > 0.
        offset: added to the linear half.
    """

    limit: float = 7.0
    alpha: float = 1.702
    offset: float = 1.0
    kind: ClassVar[str] = "clamped_swiglu"
    is_glu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "limit", "alpha")


@dataclass(frozen=True)
class SquaredRelu(Activation):
    """``relu(x) ** 2``; no GLU."""

    kind: ClassVar[str] = "squared_relu"
    is_glu: ClassVar[bool] = False


@dataclass(frozen=True)
class Situ(Activation):
    """``beta1 * tanh(a / beta1) * sigmoid(a) * beta2 * tanh(b / beta2)``: a swiglu whose two factors saturate.

    Args:
        beta1: bound of the gate half, > 0.
        beta2: bound of the linear half, > 0.
    """

    beta1: float = 4.0
    beta2: float = 25.0
    kind: ClassVar[str] = "situ"
    is_glu: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_positive(self, "beta1", "beta2")


def _check_positive(act: Activation, *names: str) -> None:
    for name in names:
        if not getattr(act, name) > 0:
            raise ValueError(f"{name}={getattr(act, name)!r} is not legal; it must be above 0")


_KINDS: dict[str, type[Activation]] = {cls.kind: cls for cls in (Swiglu, ClampedSwiglu, SquaredRelu, Situ)}
# listed here: torch.compile cannot ask a class for its fields
_OPTIONS = {kind: [f.name for f in fields(cls)] for kind, cls in _KINDS.items()}


def parse(act: str | Activation) -> Activation:
    """The activation of a string made by ``spec()``; a bare name such as ``"swiglu"`` means its defaults.

    An :class:`Activation` is returned as it is.

    Raises:
        ValueError: unknown name or option, or an illegal value, naming the legal ones.
        TypeError: neither a string nor an activation.
    """
    if isinstance(act, Activation):
        return act
    if not isinstance(act, str):
        raise TypeError(f"act={act!r} is a {type(act).__name__}; a string or an Activation is needed")
    return _parse(act)


@lru_cache(maxsize=256)
def _parse(spec: str) -> Activation:
    kind, *options = spec.split(":")
    if kind not in _KINDS:
        raise ValueError(f"activation {spec!r}: {kind!r} is not one of {sorted(_KINDS)}")
    cls = _KINDS[kind]
    known = _OPTIONS[kind]
    values: dict[str, float] = {}
    for option in options:
        name, _, text = option.partition("=")
        if name not in known:
            raise ValueError(f"activation {spec!r}: option {name!r} is not one of {known}")
        try:
            values[name] = float(text)
        except ValueError:
            raise ValueError(f"activation {spec!r}: {name}={text!r} is not a number") from None
    return cls(**values)
