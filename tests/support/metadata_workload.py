"""Clients that change and read topics of a real cluster, one attempt an operation, and the history of what they saw.

An attempt that ends without a word about the command (no connection, no time, an unknown outcome) may have happened or
not; the history says so, and nothing is retried here, so that the brokers' own retries are what is tested.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from grpc import aio

from raftlog.v1 import admin_pb2, common_pb2
from raftlog.v1.admin_pb2_grpc import AdminStub
from raftlog.v1.records_pb2 import ConfigResource
from tests.support.linearizability import NO_ANSWER, Operation

KEY = "retention.ms"
ATTEMPT_S = 3.0
REFUSED_CODES = {common_pb2.INVALID_REPLICATION_FACTOR, common_pb2.BROKER_OVERLOADED, common_pb2.STORAGE_FULL}
"""Answers that say for certain that nothing was changed, and nothing about the topic."""

UNREAD = "unread"
"""Stands for every value that no read returned."""

ConfigState = str | None
"""The value of KEY; None: there is no such topic."""


class ConfigModel:
    """A topic with one config. Requests: ("create", value), ("set", value), ("delete",), ("read",).

    Answers: "ok", "exists", "unknown", "refused", and for a read the value, or None.
    """

    initial: ConfigState = None

    def step(self, state: ConfigState, request: object, answer: object) -> tuple[bool, ConfigState]:
        """See `tests.support.linearizability.Model`."""
        assert isinstance(request, tuple)
        if answer == "refused":
            return True, state
        match request[0]:
            case "read":
                return answer in (NO_ANSWER, state), state
            case "create":
                possible, after, otherwise = state is None, request[1], "exists"
            case "set":
                possible, after, otherwise = state is not None, request[1], "unknown"
            case _:
                possible, after, otherwise = state is not None, None, "unknown"
        return answer in (NO_ANSWER, "ok" if possible else otherwise), after if possible else state


def without_unread_values(history: Iterable[Operation]) -> list[Operation]:
    """Return a history that has an order exactly if this one has, without what cannot matter.

    Reads without an answer are left out. Values that no read returned become one, UNREAD: no answer tells them apart.
    A set without an answer and with such a value is left out: an order explains everything just as well without it.
    """
    operations = list(history)
    read = {each.answer for each in operations if each.request == ("read",)}
    kept = []
    for each in operations:
        assert isinstance(each.request, tuple)
        kind, *values = each.request
        unread = bool(values) and values[0] not in read
        if each.answer is NO_ANSWER and (kind == "read" or (kind == "set" and unread)):
            continue
        kept.append(replace(each, request=(kind, UNREAD)) if unread else each)
    return kept


@dataclass(slots=True)
class Barrier:
    """The result of a linearizable description of the cluster."""

    invoked_at: float
    returned_at: float
    controller_epoch: int
    metadata_offset: int


@dataclass
class Workload:
    """Runs clients on the event loop until `stop`. Keys are topics; each has its own history."""

    bootstrap: str
    clients: int
    topics: int
    seed: int
    chance: random.Random = field(init=False)
    history: list[tuple[str, Operation]] = field(default_factory=list)
    barriers: list[Barrier] = field(default_factory=list)
    acknowledged: int = 0
    stopping: bool = False

    def __post_init__(self) -> None:
        self.chance = random.Random(self.seed)
        self._value = 0
        self._channels = [aio.insecure_channel(address) for address in self.bootstrap.split(",")]
        self._stubs = [AdminStub(channel) for channel in self._channels]

    async def run(self, until: Callable[[], bool]) -> None:
        """Let the clients work until `until` says enough, then read every topic once more."""
        self._until = until
        await asyncio.gather(*(self._client(number) for number in range(self.clients)))

    async def read_all(self) -> None:
        """Read every topic, until there is an answer."""
        for number in range(self.topics):
            name = self._name(number)
            for _ in range(1_000):
                if await self._read(name, -1, self.chance.choice(self._stubs)) is not NO_ANSWER:
                    break
                await asyncio.sleep(0.1)

    async def close(self) -> None:
        """Close the connections."""
        for channel in self._channels:
            await channel.close()

    @staticmethod
    def _name(number: int) -> str:
        return f"chaos-{number}"

    async def _client(self, number: int) -> None:
        stub = self.chance.choice(self._stubs)
        while not self._until():
            name, draw = self._name(self.chance.randrange(self.topics)), self.chance.random()
            if draw < 0.10:
                answer = await self._read(name, number, stub)
            elif draw < 0.13:
                answer = await self._change(name, number, ("delete",), stub)
            elif draw < 0.25:
                answer = await self._change(name, number, ("create", self._new_value()), stub)
            else:
                answer = await self._change(name, number, ("set", self._new_value()), stub)
            if answer is NO_ANSWER:
                stub = self.chance.choice(self._stubs)
                await asyncio.sleep(0.05)

    def _new_value(self) -> str:
        self._value += 1
        return str(1_000_000 + self._value)

    async def _change(self, name: str, client: int, request: tuple[str, ...], stub: AdminStub) -> object:
        invoked_at = asyncio.get_running_loop().time()
        call: Any
        match request:
            case ("create", value):
                message = admin_pb2.CreateTopicRequest(name=name, partitions=1, configs={KEY: value})
                call = stub.CreateTopic(message, timeout=ATTEMPT_S)
            case ("set", value):
                resource = ConfigResource(type=ConfigResource.TOPIC, name=name)
                altered = admin_pb2.AlterConfigsRequest(resource=resource, set={KEY: value})
                call = stub.AlterConfigs(altered, timeout=ATTEMPT_S)
            case _:
                call = stub.DeleteTopic(admin_pb2.DeleteTopicRequest(name=name), timeout=ATTEMPT_S)
        answer = _meaning(await _code_of(call))
        self.acknowledged += answer == "ok"
        self._note(name, client, invoked_at, request, answer)
        return answer

    async def _read(self, name: str, client: int, stub: AdminStub) -> object:
        """Read at an offset that a barrier gave: as new as anything acknowledged before."""
        loop = asyncio.get_running_loop()
        invoked_at = loop.time()
        answer: object = NO_ANSWER
        try:
            describe: Any = stub.DescribeCluster(admin_pb2.DescribeClusterRequest(linearizable=True), timeout=ATTEMPT_S)
            described = await describe
            if described.error.code == common_pb2.NONE:
                self.barriers.append(
                    Barrier(invoked_at, loop.time(), described.controller_epoch, described.metadata_offset)
                )
                read: Any = stub.DescribeConfigs(
                    admin_pb2.DescribeConfigsRequest(
                        resource=ConfigResource(type=ConfigResource.TOPIC, name=name),
                        min_metadata_offset=described.metadata_offset,
                    ),
                    timeout=ATTEMPT_S,
                )
                configs = await read
                if configs.error.code == common_pb2.NONE:
                    answer = next(entry.value for entry in configs.entries if entry.key == KEY)
                elif configs.error.code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION:
                    answer = None
        except grpc.RpcError:
            pass  # no answer
        self._note(name, client, invoked_at, ("read",), answer)
        return answer

    def _note(self, name: str, client: int, invoked_at: float, request: object, answer: object) -> None:
        returned_at = None if answer is NO_ANSWER else asyncio.get_running_loop().time()
        self.history.append((name, Operation(client, invoked_at, returned_at, request, answer)))


async def _code_of(call: Any) -> common_pb2.ErrorCode.ValueType | None:
    try:
        response = await call
    except grpc.RpcError:
        return None
    code: common_pb2.ErrorCode.ValueType = response.error.code
    return code


def _meaning(code: common_pb2.ErrorCode.ValueType | None) -> object:
    if code == common_pb2.NONE:
        return "ok"
    if code == common_pb2.TOPIC_ALREADY_EXISTS:
        return "exists"
    if code == common_pb2.UNKNOWN_TOPIC_OR_PARTITION:
        return "unknown"
    return "refused" if code in REFUSED_CODES else NO_ANSWER


def check_barriers(barriers: Iterable[Barrier]) -> None:
    """Check that epochs and offsets of linearizable descriptions never go back.

    Raises:
        AssertionError: one that began after another had ended says less.
    """
    by_start = sorted(barriers, key=lambda each: each.invoked_at)
    by_end = sorted(by_start, key=lambda each: each.returned_at)
    ended, epoch, offset = 0, 0, 0
    for barrier in by_start:
        while by_end[ended].returned_at < barrier.invoked_at:
            epoch = max(epoch, by_end[ended].controller_epoch)
            offset = max(offset, by_end[ended].metadata_offset)
            ended += 1
        assert barrier.controller_epoch >= epoch, (
            f"{barrier} has an older controller epoch than {epoch}, which a barrier before it had returned"
        )
        assert barrier.metadata_offset >= offset, (
            f"{barrier} has an older metadata offset than {offset}, which a barrier before it had returned"
        )
