"""The admin client's part that deals with producers as partitions know them, and transactions left hanging there."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple

from raftlog._client.admin_calls import names_of
from raftlog._client.admin_transactions import TransactionAdmin, abort_stages_command
from raftlog._transaction_descriptions import (
    ONGOING,
    OPEN_STATES,
    HangingTransaction,
    PartitionProducers,
    describe_producers,
)
from raftlog.errors import (
    InvalidTxnState,
    LeaderNotAvailable,
    NotEnoughReplicas,
    RaftlogError,
    TransactionalIdNotFound,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import TopicPartition
from raftlog.v1 import group_pb2, transaction_pb2

_PARTITIONS_PER_REQUEST: Final = 1_000
_PATIENCE_S: Final = 3.0
"""How long leaders are asked for what may be left out."""


class _Known(NamedTuple):
    """What coordinators know: the producer ids of stages, and where those of transactional ids have something open."""

    stages: set[int]
    parts: dict[int, set[TopicPartition]]

    def has(self, producer_id: int, part: TopicPartition) -> bool:
        """Whether a transaction that is open there may be one that a coordinator ends."""
        return producer_id in self.stages or part in self.parts.get(producer_id, ())


class ProducerAdmin(TransactionAdmin):
    """Producers, partition by partition (KIP-664)."""

    async def describe_producers(
        self, topic: str, partition: int | None, timeout: float | None
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers that partitions of a topic know."""
        (view,) = await self._topics([topic], True, timeout)
        count = len(view.partitions)
        if partition is not None and not 0 <= partition < count:
            raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}; it has {count}, from 0")
        numbers = range(count) if partition is None else [partition]
        ids = {TopicPartition(topic, number): view.topic_id for number in numbers}
        return await self._producers(ids, None, timeout)

    async def _producers(
        self, ids: Mapping[TopicPartition, bytes], missing: list[RaftlogError] | None, timeout: float | None
    ) -> dict[TopicPartition, PartitionProducers]:
        """Ask the leaders; with `missing`, which gets the reasons, partitions that do not tell are left out."""
        found: dict[TopicPartition, PartitionProducers] = {}
        reasons: dict[TopicPartition, RaftlogError] = {}

        async def attempt(deadline: float) -> None:
            reasons.clear()
            await self._metadata.refresh()
            led: dict[int, list[TopicPartition]] = {}
            for part in ids:
                if part not in found:
                    view = self._metadata.view.partition(part)
                    leader = view.leader if view is not None else -1
                    if leader in self._metadata.view.brokers:
                        led.setdefault(leader, []).append(part)
                    else:
                        reasons[part] = LeaderNotAvailable(f"{part} has no leader at the moment")
            asked = [(leader, piece) for leader, mine in led.items() for piece in _pieces(mine)]
            answers = await asyncio.gather(
                *(self._producers_at(leader, piece, ids, deadline) for leader, piece in asked), return_exceptions=True
            )
            for (_, piece), answer in zip(asked, answers, strict=True):
                if isinstance(answer, RaftlogError):
                    reasons.update(dict.fromkeys(piece, answer))
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    for part, result in zip(piece, answer, strict=True):
                        if result.error.code:
                            reasons[part] = from_wire(result.error)
                        else:
                            found[part] = describe_producers(result)
            for reason in sorted(reasons.values(), key=lambda each: each.retriable):  # those that are final first
                raise reason

        patience_s = timeout if missing is None else min(self._limit_s(timeout), _PATIENCE_S)
        try:
            await self._retried(attempt, patience_s)
        except RaftlogError as error:
            if missing is None:
                raise
            missing += list({str(reason): reason for reason in reasons.values()}.values()) or [error]
        return {part: found[part] for part in sorted(found)}

    async def _producers_at(
        self, leader: int, parts: Sequence[TopicPartition], ids: Mapping[TopicPartition, bytes], deadline: float
    ) -> Sequence[transaction_pb2.PartitionProducers]:
        request = transaction_pb2.DescribeProducersRequest(
            partitions=[group_pb2.TopicPartitions(topic_id=ids[part], partitions=[part.partition]) for part in parts]
        )
        address = self._metadata.view.brokers[leader].address
        response = await self.ask_transactions(address, "DescribeProducers", request, deadline)
        answered: Sequence[transaction_pb2.PartitionProducers] = response.partitions
        return answered

    async def find_hanging_transactions(
        self,
        topics: Iterable[str] | None,
        max_transaction_timeout_ms: int,
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> list[HangingTransaction]:
        """Return what is open on a partition for too long, and not known to a coordinator."""
        wanted = None if topics is None else names_of(topics)
        views = await self._topics(wanted, False, timeout)
        ids = {TopicPartition(view.name, part.partition): view.topic_id for view in views for part in view.partitions}
        untold: list[RaftlogError] | None = None if missing is None else []
        before_ms = time.time() * 1000 - max_transaction_timeout_ms
        suspects = [
            each for each in _open_at(await self._producers(ids, untold, timeout)) if each.started_ms <= before_ms
        ]
        if suspects:
            known = await self._coordinated({each.producer_id for each in suspects}, timeout)
            suspects = [
                each for each in suspects if not known.has(each.producer_id, TopicPartition(each.topic, each.partition))
            ]
        if suspects:
            # What has ended between the two questions is in neither answer; it is not open any more.
            again = {part: ids[part] for part in (TopicPartition(each.topic, each.partition) for each in suspects)}
            still = {_key(each) for each in _open_at(await self._producers(again, untold, timeout))}
            suspects = [each for each in suspects if _key(each) in still]
        if missing is not None and untold:
            missing[:] = untold
        return suspects

    async def _coordinated(self, producer_ids: Collection[int], timeout: float | None) -> _Known:
        """Return where coordinators know transactions of these producers to be open, or decided and not over.

        Raises:
            RaftlogError: not all coordinators have told.
        """
        known = _Known(set(), {})
        for listed in await self.list_transactions(OPEN_STATES, producer_ids, 0, None, timeout):
            if listed.sink_id:  # its producer id has no other transaction, so this is it, open or decided
                known.stages.add(listed.producer_id)
                continue
            try:
                described = (await self.describe_transactions([listed.transactional_id], timeout))[
                    listed.transactional_id
                ]
            except TransactionalIdNotFound:  # ended, and forgotten, since
                continue
            if described.state in OPEN_STATES:
                known.parts.setdefault(described.producer_id, set()).update(described.partitions)
        return known

    async def _how_to_end(self, producer_id: int, timeout: float | None) -> str:
        """Return the command that has a coordinator end what this producer has open, as a part of a sentence."""
        for listed in await self.list_transactions([ONGOING], [producer_id], 0, None, timeout):
            if not listed.sink_id:
                return f"; to end it now: raftlog txn abort {shlex.quote(listed.transactional_id)}"
            try:
                stages = (await self.describe_sink(listed.sink_id, timeout)).stages
            except TransactionalIdNotFound:  # ended, and forgotten, since
                continue
            for stage in stages:
                if stage.producer_id == producer_id:
                    return f"; to end it now: {abort_stages_command(listed.sink_id, stage.batch_id)}"
        return ""

    async def abort_hanging(
        self, part: TopicPartition, start_offset: int, force: bool, timeout: float | None
    ) -> HangingTransaction:
        """Write an abort marker for a transaction of which no coordinator knows; return what was aborted."""
        is_open = list(_open_at(await self.describe_producers(part.topic, part.partition, timeout)))
        meant = [each for each in is_open if each.start_offset == start_offset]
        if not meant:
            there = ", ".join(str(each.start_offset) for each in is_open)
            raise InvalidTxnState(
                f"no transaction of {part} begins at offset {start_offset}; "
                + (f"those that are open begin at {there}" if there else "none is open there")
            )
        (hanging,) = meant
        if not force:
            known = await self._coordinated([hanging.producer_id], timeout)
            if known.has(hanging.producer_id, part):
                raise InvalidTxnState(
                    f"the transaction of producer {hanging.producer_id} that begins at offset {start_offset} of {part} "
                    "is not hanging: its coordinator knows it, and ends it everywhere at once"
                    + await self._how_to_end(hanging.producer_id, timeout)
                )
        ids = await self._topic_ids([part], timeout)
        request = transaction_pb2.AbortHangingRequest(
            topic_id=ids[part.topic],
            partition=part.partition,
            producer_id=hanging.producer_id,
            producer_epoch=hanging.producer_epoch,
            start_offset=start_offset,
        )

        in_doubt = False

        async def attempt(deadline: float) -> None:
            nonlocal in_doubt
            await self._metadata.refresh()
            view = self._metadata.view.partition(part)
            broker = self._metadata.view.brokers.get(view.leader) if view is not None else None
            if broker is None:
                raise LeaderNotAvailable(f"{part} has no leader at the moment")
            before, in_doubt = in_doubt, True
            response = await self.ask_transactions(broker.address, "AbortHanging", request, deadline)
            error = from_wire(response.error) if response.error.code else None
            if isinstance(error, NotEnoughReplicas):
                in_doubt = before  # nothing was appended
            if not isinstance(error, InvalidTxnState) or not before:
                if error is not None:
                    raise error
            elif force:
                raise InvalidTxnState(
                    f"the transaction of producer {hanging.producer_id} that began at offset {start_offset} of {part} "
                    "is over, but it is not known who has ended it: this request, whose answer was lost, or its "
                    f"coordinator, which may have committed it ({error})"
                )
            # Else an attempt before has aborted it, and its answer was lost: no coordinator knew it, to commit it.

        await self._retried(attempt, timeout)
        return hanging


def _open_at(found: Mapping[TopicPartition, PartitionProducers]) -> Iterator[HangingTransaction]:
    """Yield what is open, hanging or not."""
    for (topic, partition), described in found.items():
        for each in described.producers:
            if each.transaction_start_offset is not None:
                yield HangingTransaction(
                    topic,
                    partition,
                    each.producer_id,
                    each.producer_epoch,
                    each.transaction_start_offset,
                    each.transaction_started_ms or each.last_append_ms,
                    each.last_append_ms,
                )


def _key(each: HangingTransaction) -> tuple[str, int, int, int]:
    return each.topic, each.partition, each.producer_id, each.start_offset


def _pieces(parts: Sequence[TopicPartition]) -> Iterator[Sequence[TopicPartition]]:
    for at in range(0, len(parts), _PARTITIONS_PER_REQUEST):
        yield parts[at : at + _PARTITIONS_PER_REQUEST]
