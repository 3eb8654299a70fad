"""Short names of kernels: the nested name of an Itanium-mangled symbol without template arguments and parameters."""

from __future__ import annotations

import re
from functools import lru_cache

_LENGTH = re.compile(r"\d+")
_ANONYMOUS = "_GLOBAL__N_"


@lru_cache(maxsize=1 << 16)
def family(mangled: str) -> str:
    """``"transformer_engine::f"`` for ``_ZN18transformer_engine1fILi4EEvv``; the name itself when it is not mangled.

    Kernels of one template share it. Ends at the first template argument list.
    """
    if not mangled.startswith("_Z"):
        return mangled
    at, parts = 2, []
    if mangled[at : at + 1] == "N":
        at += 1
        while mangled[at : at + 1] in ("K", "V", "R"):
            at += 1
    while True:
        if mangled.startswith("St", at):
            parts.append("std")
            at += 2
        elif mangled.startswith("L", at) and mangled[at + 1 : at + 2].isdigit():
            at += 1
        elif match := _LENGTH.match(mangled, at):
            end = match.end() + int(match.group())
            name = mangled[match.end() : end]
            if end > len(mangled):
                break
            parts.append("(anonymous)" if name.startswith(_ANONYMOUS) else name)
            at = end
            if mangled[2:3] != "N":
                break
        else:
            break
    return "::".join(parts) or mangled
