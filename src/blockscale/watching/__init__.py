"""Watching a model: counters of every tensor, and the name of the first one that went wrong (``bs.watch``)."""

from blockscale.watching.findings import METRICS, ROLES, Finding
from blockscale.watching.log import read_log
from blockscale.watching.watch import Watch, WatchStop, watch

__all__ = ["METRICS", "ROLES", "Finding", "Watch", "WatchStop", "read_log", "watch"]
