"""From what a user names to images of device code."""

from blockscale.guard.audit.readers.fatbin import decompress
from blockscale.guard.audit.readers.model import Image, NotChecked
from blockscale.guard.audit.readers.targets import UnknownTargetError, cache_folders, mapped_files, resolve
from blockscale.guard.audit.readers.units import Files, Images, Members, Unit, plan, read, weight

__all__ = [
    "Files",
    "Image",
    "Images",
    "Members",
    "NotChecked",
    "Unit",
    "UnknownTargetError",
    "cache_folders",
    "decompress",
    "mapped_files",
    "plan",
    "read",
    "resolve",
    "weight",
]
