"""What tools look at in a consumer: what it has no contact with, and what brokers say of partitions now."""

from __future__ import annotations

from collections.abc import Iterable

from raftlog._client.group_consumer import GroupEngine
from raftlog._client.offsets import STRAGGLER_GRACE_S
from raftlog._consumer import Consumer
from raftlog.errors import InvalidRequestError, RaftlogError
from raftlog.types import TopicPartition


def out_of_reach(consumer: Consumer) -> dict[TopicPartition, str]:
    """Return the assigned partitions whose leaders the consumer has no contact with, and why."""
    consumer._engine.check_open()
    return consumer._thread.run(consumer._engine.out_of_reach())


def leaderless(consumer: Consumer, partition: TopicPartition) -> str | None:
    """Return a sentence when nobody leads the partition, as far as the consumer knows."""
    return consumer._engine.metadata.view.without_leader(partition)


def position_now(consumer: Consumer, partition: TopicPartition) -> int | None:
    """Return the offset of the next record; None while the start is being looked up, and for what is not assigned.

    Raises:
        OffsetOutOfRange: there is no position, and `auto.offset.reset` says to get none.
    """
    unread = consumer._unread.first_offsets().get(partition)
    if unread is not None:
        return unread
    try:
        return consumer._engine.position_now(partition)
    except InvalidRequestError:  # the session was over just now
        return None


def why_no_member(consumer: Consumer) -> str | None:
    """Return why a consumer that has subscribed in a group is no member of it at the moment; None: it is one."""
    engine = consumer._engine
    if not isinstance(engine, GroupEngine) or not engine.subscribed or engine.membership.is_member:
        return None
    return f"group {engine.group_id}: {engine.membership.refusal or 'its coordinator has not answered'}"


def partitions_now(consumer: Consumer, topic: str, patience_s: float) -> list[TopicPartition]:
    """Return the partitions of a topic as brokers know them now.

    Raises:
        RaftlogError: nobody says so within `patience_s`.
    """
    consumer._engine.check_open()
    view = consumer._thread.run(consumer._engine.metadata.topic(topic, patience_s * 1000, fresh=True))
    return [TopicPartition(topic, part.partition) for part in view.partitions]


def try_offsets(
    consumer: Consumer,
    partitions: Iterable[TopicPartition],
    which: int,
    grace_s: float = STRAGGLER_GRACE_S,
    patience_s: float | None = None,
) -> dict[TopicPartition, int | RaftlogError]:
    """Return the first or last offset (EARLIEST, LATEST) of the partitions that answer, and why the others do not.

    Arguments and errors are those of `OffsetLookup.find_some`.
    """
    engine = consumer._engine
    engine.check_open()
    wanted = dict.fromkeys(partitions, which)
    found = consumer._thread.run(engine.lookup.find_some(wanted, engine.options.isolation_level, grace_s, patience_s))
    return {
        part: answer if isinstance(answer, RaftlogError) else answer.offset
        for part, answer in found.items()
        if answer is not None
    }
