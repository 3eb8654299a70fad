"""Reads every kernel of a library, for every target, without a GPU, and says which carry known faults."""

from blockscale.guard.audit.engine import Config, Finding, Result, as_json, audit, audit_files
from blockscale.guard.audit.limits import Limits, MalformedError
from blockscale.guard.audit.readers import NotChecked, UnknownTargetError
from blockscale.guard.audit.rules import RULES, Options, UnknownRuleError

__all__ = [
    "RULES",
    "Config",
    "Finding",
    "Limits",
    "MalformedError",
    "NotChecked",
    "Options",
    "Result",
    "UnknownRuleError",
    "UnknownTargetError",
    "as_json",
    "audit",
    "audit_files",
]
