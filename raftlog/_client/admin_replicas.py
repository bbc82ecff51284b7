"""The admin client's part that deals with replicas: how far they are, and moving them (KIP-455)."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from raftlog._client.admin_calls import AdminCalls, names_of
from raftlog._core.cluster import BrokerView, TopicView
from raftlog._descriptions import (
    PartitionReplicas,
    Reassignment,
    TopicDescription,
    describe,
    describe_replicas,
)
from raftlog.errors import RaftlogError, UnknownTopicOrPartition, from_wire
from raftlog.types import TopicPartition
from raftlog.v1 import admin_pb2

MAX_REASSIGNMENTS_PER_REQUEST: Final = 500
LEADERS_SHARE: Final = 0.8
"""Of the time that is left, for leaders to answer: one that is frozen must not take the answers of the others along."""


class ReplicaAdmin(AdminCalls):
    """Replicas."""

    async def describe_topics(
        self, names: Iterable[str] | None, internal: bool, timeout: float | None
    ) -> list[TopicDescription]:
        """Return what topics consist of: all, or those that are named, in that order."""
        return [describe(view) for view in await self._topics(names, internal, timeout)]

    async def _topics(self, names: Iterable[str] | None, internal: bool, timeout: float | None) -> list[TopicView]:
        wanted = None if names is None else names_of(names)

        async def attempt(deadline: float) -> list[TopicView]:
            if wanted is None:
                return await self._all_topics(internal)
            self._metadata.wanted.update(wanted)
            await self._metadata.refresh()
            view = self._metadata.view
            for name in wanted:
                if name not in view.topics:
                    self._metadata.wanted.discard(name)
                    raise view.missing.get(name) or UnknownTopicOrPartition(f"there is no topic {name!r}")
            return [view.topics[name] for name in wanted]

        return await self._retried(attempt, timeout)

    async def describe_replicas(
        self, topics: Iterable[str] | None, silent: dict[int, RaftlogError] | None, timeout: float | None
    ) -> dict[TopicPartition, PartitionReplicas]:
        """Return what leaders know of their replicas; partitions of leaders that do not answer are missing.

        `silent` gets why, by broker. Without it, it is an error when none of them answers.
        """
        wanted = None if topics is None else names_of(topics)

        async def attempt(deadline: float) -> dict[TopicPartition, PartitionReplicas]:
            views = await self._topics(wanted, True, timeout)
            brokers = self._metadata.view.brokers
            now = asyncio.get_running_loop().time()
            asked_until = now + LEADERS_SHARE * (deadline - now)
            led_by: dict[int, list[bytes]] = {}
            for view in views:
                for leader in {part.leader for part in view.partitions} & brokers.keys():
                    led_by.setdefault(leader, []).append(view.topic_id)
            asked = [
                self._replicas_led_by(brokers[leader], [] if wanted is None else topic_ids, asked_until)
                for leader, topic_ids in sorted(led_by.items())
            ]
            names = {view.topic_id: view.name for view in views}
            found: dict[TopicPartition, PartitionReplicas] = {}
            failures: dict[int, RaftlogError] = {}
            answers = await asyncio.gather(*asked, return_exceptions=True)
            for leader, answer in zip(sorted(led_by), answers, strict=True):
                if isinstance(answer, RaftlogError):
                    failures[leader] = answer
                elif isinstance(answer, BaseException):
                    raise answer
                else:
                    for described in describe_replicas(*answer, names):
                        key = TopicPartition(described.topic, described.partition)
                        if key not in found or found[key].leader_epoch < described.leader_epoch:
                            found[key] = described
            if silent is not None:
                silent.update(failures)
            elif failures and len(failures) == len(asked):
                raise next(iter(failures.values()))
            return dict(sorted(found.items()))

        return await self._retried(attempt, timeout)

    async def _replicas_led_by(
        self, broker: BrokerView, topic_ids: Sequence[bytes], deadline: float
    ) -> tuple[int, admin_pb2.DescribeReplicasResponse]:
        request = admin_pb2.DescribeReplicasRequest(
            topic_ids=topic_ids, min_metadata_offset=self._metadata.view.metadata_offset
        )
        return broker.broker_id, await self._call(broker.address, "DescribeReplicas", request, deadline)

    # Moves

    async def alter_reassignments(
        self, wanted: Mapping[TopicPartition, Sequence[int] | None], timeout: float | None
    ) -> None:
        """Begin, turn or cancel moves; raises once all were tried, if some were refused."""
        moves = [(TopicPartition(*part), replicas) for part, replicas in wanted.items()]
        refused: list[RaftlogError] = []
        for start in range(0, len(moves), MAX_REASSIGNMENTS_PER_REQUEST):
            request = admin_pb2.AdminAlterReassignmentsRequest()
            for part, replicas in moves[start : start + MAX_REASSIGNMENTS_PER_REQUEST]:
                if replicas is not None and not replicas:
                    raise ValueError(f"{part} has to have replicas somewhere; None cancels the move under way")
                request.reassignments.add(topic=part.topic, partition=part.partition, replicas=replicas or ())
            response: admin_pb2.AdminAlterReassignmentsResponse = await self._anyone(
                "AlterReassignments", request, timeout
            )
            refused += [from_wire(each.error) for each in response.results if each.error.code]
        if refused:
            were = "was refused" if len(refused) == 1 else "were refused, this is the first"
            more = f"; {len(refused)} of {len(moves)} {were}" if len(moves) > 1 else ""
            raise type(refused[0])(f"{refused[0]}{more}")

    async def list_reassignments(self, timeout: float | None) -> dict[TopicPartition, Reassignment]:
        """Return the moves under way."""
        return {
            TopicPartition(view.name, part.partition): Reassignment(
                [replica for replica in part.replicas if replica not in part.removing_replicas],
                list(part.adding_replicas),
                list(part.removing_replicas),
            )
            for view in await self._topics(None, True, timeout)
            for part in view.partitions
            if part.adding_replicas or part.removing_replicas
        }
