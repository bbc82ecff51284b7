"""The files of a compaction under way, and how a start finishes or forgets it.

    00000000000000000042.cleaned                        being written; means nothing after a restart
    00000000000000000042-00000000000000000099.swap      takes the place of every segment in [42, 99)

The renaming from the first to the second is the decision. What follows can be repeated until it is done: the segments
that it replaces, and their indexes, are renamed away; that is made durable; then the new file gets the name of a
segment. Its index is written in between, or rebuilt.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final, NamedTuple

from broker.log.segment import DELETED_SUFFIX, SUFFIXES, segment_stem
from broker.log.storage import Storage

CLEANED_SUFFIX: Final = ".cleaned"
_SWAP: Final = re.compile(r"(\d{20})-(\d{20})\.swap")


class Swap(NamedTuple):
    """A new file for the segments that begin in [base_offset, next_offset)."""

    base_offset: int
    next_offset: int

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{self.base_offset:020d}-{self.next_offset:020d}.swap"


def cleaned_path(directory: str, base_offset: int) -> str:
    """Return the path of a segment that is being written."""
    return segment_stem(directory, base_offset) + CLEANED_SUFFIX


def replaced_files(swap: Swap, names: Iterable[str]) -> list[str]:
    """Return which of a directory's files a swap replaces."""
    found = []
    for name in names:
        stem, dot, suffix = name.partition(".")
        if dot + suffix in SUFFIXES and stem.isdigit() and swap.base_offset <= int(stem) < swap.next_offset:
            found.append(name)
    return sorted(found)


def finish_swaps(storage: Storage, directory: str, sizes: dict[str, int]) -> dict[str, int]:
    """Bring to an end what the last process left behind; return the names and sizes of what is there then.

    `sizes`: what `list_sizes` says of the directory. Raises OSError.
    """
    swaps = [Swap(int(found[1]), int(found[2])) for found in map(_SWAP.fullmatch, sizes) if found]
    halves = [name for name in sizes if name.endswith(CLEANED_SUFFIX)]
    if not swaps and not halves:
        return sizes
    for name in halves:
        storage.remove(f"{directory}/{name}")
    for swap in sorted(swaps):
        for name in replaced_files(swap, storage.list_sizes(directory)):
            storage.rename(f"{directory}/{name}", f"{directory}/{name}{DELETED_SUFFIX}")
        storage.sync_dir(directory)
        storage.rename(f"{directory}/{swap.name}", segment_stem(directory, swap.base_offset) + ".log")
        storage.sync_dir(directory)
    return storage.list_sizes(directory)
