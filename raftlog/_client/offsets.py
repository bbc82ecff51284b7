"""Looks offsets up at the leaders, by time or by name."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable, Mapping
from typing import Final, Protocol

import grpc

from raftlog._client.connections import Connections, from_grpc
from raftlog._client.metadata import UNKNOWN_TOPIC_GRACE_S, MetadataCache
from raftlog._core.backoff import Pauses
from raftlog.errors import (
    BrokerUnavailable,
    FencedError,
    LeaderNotAvailable,
    RaftlogError,
    RequestTimedOut,
    RetriableError,
    UnknownTopicOrPartition,
    from_wire,
)
from raftlog.types import OffsetAndTimestamp, TopicPartition
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc

PARTS_AT_A_TIME: Final = 5_000
"""Partitions in one request; brokers take twice as many."""
LATEST: Final = -1
EARLIEST: Final = -2
LARGEST_TIMESTAMP: Final = -3
STRAGGLER_GRACE_S: Final = 2.0
"""How long partitions that do not say where they begin or end may hold those back that do: most changes of leaders take
less, and what takes longer is read when it is back."""
_PATIENCE_S: Final = 0.5
"""How long an answer may take before it is asked whether the broker still leads; then every `_LOOK_S`."""
_LOOK_S: Final = 0.05


class LookupOptions(Protocol):
    """The options that a look-up needs."""

    @property
    def default_api_timeout_ms(self) -> float: ...
    @property
    def request_timeout_ms(self) -> float: ...
    @property
    def pauses(self) -> Pauses: ...


class AtOffset(int):
    """Asks for the first record at or after this offset, where else a time would stand."""


Answer = OffsetAndTimestamp | None | RaftlogError
"""An offset, None when there is no such record, or why this partition could not say."""


def may_pass(error: RaftlogError) -> bool:
    """Whether a partition may answer later what it refused now."""
    return isinstance(error, (RetriableError, FencedError))


class OffsetLookup:
    """`Log.ListOffsets`: an answer or an error for each partition by itself; `find` asks again for what was refused."""

    def __init__(self, metadata: MetadataCache, connections: Connections, options: LookupOptions) -> None:
        self._metadata = metadata
        self._connections = connections
        self._options = options

    async def find(
        self, timestamps_ms: Mapping[TopicPartition, int], isolation: common_pb2.IsolationLevel.ValueType
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return for each partition the first offset at or after the time (or LATEST, EARLIEST, LARGEST_TIMESTAMP),
        None when there is no such record.

        Raises:
            RaftlogError: what a partition refused last, when `default.api.timeout.ms` has passed or it is final.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._options.default_api_timeout_ms / 1000
        for topic in dict.fromkeys(topic_partition.topic for topic_partition in timestamps_ms):
            await self._metadata.topic(topic, self._options.default_api_timeout_ms)
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        failures = 0
        while True:
            errors = await self._ask_again(timestamps_ms, isolation, found)
            if not errors:
                return found
            now = loop.time()
            for error in errors:
                denied = isinstance(error, UnknownTopicOrPartition) and now - started >= UNKNOWN_TOPIC_GRACE_S
                if denied or now >= deadline or not may_pass(error):
                    raise error
            failures += 1
            await asyncio.sleep(self._options.pauses.after_ms(errors[0], failures) / 1000)
            try:
                await self._metadata.refresh()
            except RetriableError:
                if loop.time() >= deadline:
                    raise

    async def find_some(
        self,
        timestamps_ms: Mapping[TopicPartition, int],
        isolation: common_pb2.IsolationLevel.ValueType,
        grace_s: float = STRAGGLER_GRACE_S,
        patience_s: float | None = None,
        *,
        raises: bool = True,
    ) -> dict[TopicPartition, Answer]:
        """Return what `find` does for partitions that answer, and for each of the others why it does not.

        Once one has answered, the others are waited for `grace_s` at most. Without `raises` refusals for good, and that
        none has answered, are answers as well.

        Raises:
            RaftlogError: a partition refuses for good, or none has answered within `patience_s` (by default
                `default.api.timeout.ms`).
        """
        loop = asyncio.get_running_loop()
        patience_s = self._options.default_api_timeout_ms / 1000 if patience_s is None else patience_s
        until = loop.time() + patience_s
        for topic in dict.fromkeys(topic_partition.topic for topic_partition in timestamps_ms):
            await self._metadata.topic(topic, patience_s * 1000)
        found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
        failures = 0
        while True:
            by_node, refused = self.by_leader(part for part in timestamps_ms if part not in found)
            errors = dict(refused)
            asking = {
                loop.create_task(self.ask(node_id, {part: timestamps_ms[part] for part in parts}, isolation)): parts
                for node_id, parts in by_node.items()
            }
            try:
                while asking:
                    done, _ = await asyncio.wait(
                        asking, timeout=max(0.0, until - loop.time()), return_when=asyncio.FIRST_COMPLETED
                    )
                    for task in [each for each in asking if each in done]:
                        del asking[task]
                        for part, answer in task.result().items():
                            if isinstance(answer, RaftlogError):
                                errors[part] = answer
                            else:
                                found[part] = answer
                    if found:
                        until = min(until, loop.time() + grace_s)
                    if not done:
                        break
            finally:
                for task, parts in asking.items():
                    task.cancel()
                    errors |= {part: RequestTimedOut(f"{part}: its leader has not answered yet") for part in parts}
            final = next((error for error in errors.values() if not may_pass(error)), None)
            late = loop.time() >= until
            if raises and (final is not None or (late and not found)):
                raise final or next(iter(errors.values()))
            if late or not any(map(may_pass, errors.values())):
                return {**found, **errors}
            failures += 1
            pause_s = self._options.pauses.after_ms(next(iter(errors.values())), failures) / 1000
            await asyncio.sleep(max(0.0, min(pause_s, until - loop.time())))

    async def _ask_again(
        self,
        timestamps_ms: Mapping[TopicPartition, int],
        isolation: common_pb2.IsolationLevel.ValueType,
        found: dict[TopicPartition, OffsetAndTimestamp | None],
    ) -> list[RaftlogError]:
        """Ask for what is not in `found`, all leaders at once; return what was refused."""
        by_node, refused = self.by_leader(part for part in timestamps_ms if part not in found)
        rounds = await asyncio.gather(
            *(
                self.ask(node_id, {part: timestamps_ms[part] for part in parts}, isolation)
                for node_id, parts in by_node.items()
            )
        )
        errors = list(refused.values())
        for answers in rounds:
            for part, answer in answers.items():
                if isinstance(answer, RaftlogError):
                    errors.append(answer)
                else:
                    found[part] = answer
        return errors

    def by_leader(
        self, parts: Iterable[TopicPartition]
    ) -> tuple[dict[int, list[TopicPartition]], dict[TopicPartition, RaftlogError]]:
        """Return whom to ask for what, and why the rest cannot be asked for now."""
        by_node: dict[int, list[TopicPartition]] = {}
        refused: dict[TopicPartition, RaftlogError] = {}
        for part in parts:
            leader = self._metadata.leader(part)
            if leader is not None:
                by_node.setdefault(leader.broker_id, []).append(part)
            elif self._metadata.view.partition(part) is None:
                refused[part] = UnknownTopicOrPartition(f"{part} does not exist")
            else:
                refused[part] = LeaderNotAvailable(f"{part} has no leader at the moment")
        if refused:
            self._metadata.request_refresh()
        return by_node, refused

    async def ask(
        self, node_id: int, wanted: Mapping[TopicPartition, int], isolation: common_pb2.IsolationLevel.ValueType
    ) -> dict[TopicPartition, Answer]:
        """Ask one broker once; return an answer or an error for each partition."""
        if len(wanted) <= PARTS_AT_A_TIME:
            return await self._ask_some(node_id, wanted, isolation)
        parts = list(wanted.items())
        pieces = [dict(parts[at : at + PARTS_AT_A_TIME]) for at in range(0, len(parts), PARTS_AT_A_TIME)]
        answers: dict[TopicPartition, Answer] = {}
        for some in await asyncio.gather(*(self._ask_some(node_id, piece, isolation) for piece in pieces)):
            answers |= some
        return answers

    async def _ask_some(
        self, node_id: int, wanted: Mapping[TopicPartition, int], isolation: common_pb2.IsolationLevel.ValueType
    ) -> dict[TopicPartition, Answer]:
        address = self._metadata.address(node_id)
        if address is None:
            return self._unreached(wanted, BrokerUnavailable(f"broker {node_id} is not part of the cluster any more"))
        answers: dict[TopicPartition, Answer] = {}
        asked = []
        request = log_pb2.ListOffsetsRequest(isolation_level=isolation)
        for part, timestamp_ms in wanted.items():
            topic = self._metadata.view.topics.get(part.topic)
            view = self._metadata.view.partition(part)
            if topic is None or view is None:
                answers[part] = UnknownTopicOrPartition(f"{part} does not exist")
                continue
            asked.append(part)
            request.partitions.add(
                topic_id=topic.topic_id,
                partition=part.partition,
                leader_epoch=view.leader_epoch,
                timestamp_ms=timestamp_ms,
                at_offset=timestamp_ms if isinstance(timestamp_ms, AtOffset) else None,
            )
        stub = log_pb2_grpc.LogStub(self._connections.channel(address))
        try:
            call = stub.ListOffsets(request, timeout=self._options.request_timeout_ms / 1000)
            response = await self._while_it_leads(call, node_id, asked)
        except (grpc.RpcError, RaftlogError) as error:
            return self._unreached(wanted, from_grpc(error, address))
        for part, result in zip(asked, response.results, strict=True):
            if result.HasField("error") and result.error.code:
                answers[part] = from_wire(result.error)
                self._metadata.learn(part.topic, part.partition, result.error)
            elif result.offset < 0:
                answers[part] = None
            else:
                answers[part] = OffsetAndTimestamp(result.offset, result.timestamp_ms, result.leader_epoch)
        return answers

    async def _while_it_leads(
        self, call: Awaitable[log_pb2.ListOffsetsResponse], node_id: int, asked: Iterable[TopicPartition]
    ) -> log_pb2.ListOffsetsResponse:
        """Wait for the answer of a broker; if it is slow, no longer than it leads what it was asked for.

        Raises:
            BrokerUnavailable: somebody else leads now.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = asyncio.ensure_future(call)
        patience_s = _PATIENCE_S
        try:
            while not (await asyncio.wait([answer], timeout=patience_s))[0]:
                leaders = [self._metadata.leader(part) for part in asked]
                if any(leader is not None and leader.broker_id != node_id for leader in leaders):
                    raise BrokerUnavailable(f"broker {node_id} does not answer, and leads no more")
                self._metadata.request_refresh(missing_since_s=started_s, probe=node_id)
                patience_s = _LOOK_S
            return answer.result()
        finally:
            answer.cancel()

    def _unreached(self, wanted: Iterable[TopicPartition], error: RaftlogError) -> dict[TopicPartition, Answer]:
        self._metadata.request_refresh()
        return dict.fromkeys(wanted, error)
