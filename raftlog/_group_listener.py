"""What an application is told of partitions that come and go (KIP-429)."""

from __future__ import annotations

from raftlog.types import TopicPartition


class RebalanceListener:
    """Told of partitions that a member of a group gets and gives up. Override what you need.

    Called in the thread that polls: out of `poll`, iteration, `subscribe`, `unsubscribe` or `close`, never besides
    them. Only partitions that move are named; the others are read on. What a method raises comes out of that call.
    `close` and `unsubscribe` work here, too; out of one that is under way they change nothing.
    In `raftlog.aio` the methods may be coroutines, which are awaited.
    """

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> object:
        """These are this member's now; nothing of them has been handed out yet. `seek` works here."""

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> object:
        """These are to be given up; nobody else has them before this returns. `commit` works here."""

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> object:
        """These are gone already, and others may read them: the session ended. By default as if revoked, though
        commits are refused now."""
        return self.on_partitions_revoked(partitions)
