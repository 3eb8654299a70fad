"""How numbers read: fixed digits, percentages, bytes, durations. Each takes a table value and returns text."""

from __future__ import annotations

import math
from collections.abc import Callable

Printable = str | int | float | bool | None
DASH = "-"


def plain(value: Printable) -> str:
    """``str``, with a dash for None and yes/no for a bool."""
    if value is None:
        return DASH
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(value)


def _number(value: Printable, show: Callable[[float], str]) -> str:
    if value is None or isinstance(value, str):
        return plain(value)
    return show(float(value)) if math.isfinite(float(value)) else str(float(value))


def fixed(digits: int) -> Callable[[Printable], str]:
    """``fixed(4)(2.5)`` is ``"2.5000"``."""
    return lambda value: _number(value, lambda number: f"{number:.{digits}f}")


def percent(digits: int, *, signed: bool = False) -> Callable[[Printable], str]:
    """``percent(2)(0.314)`` is ``"0.31 %"``: the value is in percent already."""
    sign = "+" if signed else ""
    return lambda value: _number(value, lambda number: f"{number:{sign}.{digits}f} %")


def count(value: Printable) -> str:
    """An integer with thousands separators: ``"12,118"``."""
    return _number(value, lambda number: f"{number:,.0f}")


def byte_count(value: Printable) -> str:
    """Bytes with a binary unit: ``"3.1 MiB"``."""

    def show(number: float) -> str:
        for unit in ("B", "KiB", "MiB", "GiB"):
            if abs(number) < 1024 or unit == "GiB":
                return f"{number:.0f} {unit}" if unit == "B" else f"{number:.1f} {unit}"
            number /= 1024
        raise AssertionError("unreachable")

    return _number(value, show)


def duration(value: Printable) -> str:
    """Seconds as ``"12.3 s"``, ``"3 min 05 s"`` or ``"2 h 07 min"``."""

    def show(seconds: float) -> str:
        if seconds < 99.95:
            return f"{seconds:.1f} s"
        whole = round(seconds)
        if whole < 3600:
            return f"{whole // 60} min {whole % 60:02d} s"
        return f"{whole // 3600} h {whole % 3600 // 60:02d} min"

    return _number(value, show)
