"""What groups have done, and have committed: no offset goes back, and none is ahead of what its application has done.

A record is done once the application has come back for more, has asked for a commit, or has left in good order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import TYPE_CHECKING

from tests.simulation.dataplane.messages import PartitionKey
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.cluster.ledger import ClusterLedger


class GroupOffsets:
    """All groups, by name and partition."""

    def __init__(self, ledger: ClusterLedger) -> None:
        self._ledger = ledger
        self.counts: Counter[str] = Counter()
        self.committed: dict[tuple[str, PartitionKey], int] = {}
        self._done: defaultdict[tuple[str, PartitionKey], set[int]] = defaultdict(set)

    def done(self, group_id: str, key: PartitionKey, offset: int) -> None:
        """An application has done a record."""
        self.counts["records done again"] += offset in self._done[group_id, key]
        self._done[group_id, key].add(offset)

    def commits(self, group_id: str, key: PartitionKey, offset: int | None) -> None:
        """A group's offset was committed; None: it was forgotten.

        Raises:
            Violation: it goes back, or is ahead.
        """
        part = (group_id, key)
        if offset is None:
            self.committed.pop(part, None)
            return
        before = self.committed.get(part, 0)
        if offset < before:
            raise Violation(
                f"{group_id}: the committed offset of {self._ledger.name(key)} goes back from {before} to {offset}"
            )
        missing = [each for each in self._ledger.readable(key, before, offset) if each not in self._done[part]]
        if missing:
            raise Violation(
                f"{group_id} committed offset {offset} of {self._ledger.name(key)}, but no member has processed "
                f"the records at {missing}"
            )
        self.counts["offsets committed"] += offset > before
        self.committed[part] = offset

    def behind(self, group_id: str, keys: list[PartitionKey]) -> str | None:
        """Return where a group has not committed up to the end; None: it has, everywhere."""
        for key in keys:
            end = self._ledger.last_readable(key)
            if self.committed.get((group_id, key), 0) < end:
                return (
                    f"{group_id} has committed {self.committed.get((group_id, key), 0)} of {end} in "
                    f"{self._ledger.name(key)}"
                )
        return None
