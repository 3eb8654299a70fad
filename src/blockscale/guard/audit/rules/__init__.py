"""The rules. A new one is a file with a `Rule` named RULE and a line in `RULES`; docs/audit.md shows one from start to end."""

from blockscale.guard.audit.rules import generic_on_shared, never_drained, stack, syscall, tma_handoff
from blockscale.guard.audit.rules.base import SEVERITIES, Hit, KernelView, Memory, Options, Rule, Severity, Undecided

RULES: dict[str, Rule] = {module.RULE.id: module.RULE for module in (syscall, tma_handoff, never_drained, generic_on_shared, stack)}


class UnknownRuleError(ValueError):
    """A rule that does not exist was asked for."""


def select(names: list[str] | None) -> list[Rule]:
    """The named rules, or those on by default.

    Raises:
        UnknownRuleError: a name that no rule has.
    """
    if not names:
        return [rule for rule in RULES.values() if rule.default]
    unknown = [name for name in names if name not in RULES]
    if unknown:
        raise UnknownRuleError(f"no rule named {', '.join(unknown)}; there are {', '.join(RULES)}")
    return [RULES[name] for name in dict.fromkeys(names)]


__all__ = [
    "RULES",
    "SEVERITIES",
    "Hit",
    "KernelView",
    "Memory",
    "Options",
    "Rule",
    "Severity",
    "Undecided",
    "UnknownRuleError",
    "select",
]
