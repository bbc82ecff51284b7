"""Administrators that create, change, delete and describe topics, and a producer to a topic that comes and goes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from raftlog import aio
from raftlog.errors import InvalidReplicationFactor, RaftlogError, RetriableError
from raftlog.v1 import common_pb2
from tests.simulation.cluster.book import Value
from tests.simulation.cluster.client import QUICK, Application
from tests.simulation.parts import Violation

if TYPE_CHECKING:
    from tests.simulation.cluster.schedule import ClusterSimulation

CONFIGS = {"segment.bytes": ("1024", "5000"), "file.delete.delay.ms": ("0", "1000"), "max.message.bytes": ("100000",)}

LATE = (common_pb2.REQUEST_TIMED_OUT, common_pb2.UNKNOWN_OUTCOME)
"""Answers after which a change may still come."""


class Administrator(Application):
    """Has a topic of its own come and go, and changes what it is like."""

    def __init__(self, simulation: ClusterSimulation, number: int, topic: str) -> None:
        super().__init__(simulation, number, f"admin of {topic}")
        self._topic = topic
        self._there = False
        """Whether the topic is there, as far as it was told."""
        self._certain = True
        """Whether every attempt at a change so far was answered: else one may come late, and a topic with it."""
        self._changing = False
        self._unanswered = 0
        """Attempts of the client, which repeats them by itself, without an answer that says what was done."""
        self._told = False
        """Whether it was told of a change in this life: what others were told, a broker may not have heard of yet."""

    def born(self) -> None:
        """Another client."""
        self._told = False

    def died(self) -> None:
        """What it was about may be done, or not."""
        self._certain &= not self._changing

    async def work(self) -> None:
        """One change after the other."""
        async with aio.Admin(self.bootstrap, request_timeout_ms=2_000, default_api_timeout_ms=3_000) as admin:
            self._watch(admin)
            for _ in range(self.random.choice((5, 20, 10_000))):
                if self.winding_down:
                    return
                await self._change(admin)
                await self.think(longest_s=self.random.choice((0.3, 1.0)))

    def _watch(self, admin: aio.Admin) -> None:
        """Count the attempts at the calls that create and delete topics, and the answers to them."""
        engine: Any = admin._engine
        ask = engine._response

        async def watched(address: str, method: str, *rest: Any) -> Any:
            counts = method in ("CreateTopic", "DeleteTopic")
            self._unanswered += counts
            response = await ask(address, method, *rest)
            self._unanswered -= counts and response.error.code not in LATE
            return response

        engine._response = watched

    async def _change(self, admin: aio.Admin) -> None:
        chance = self.random
        self._changing = True
        what = chance.choice(("create", "create", "delete", "grow", "configure", "describe", "list"))
        timeout = chance.choice((0.5, 3.0))
        match what:
            case "create":
                replicas = chance.choice((1, 2, 3))
                error = await self.attempt(
                    admin.create_topic(
                        self._topic, partitions=chance.choice((1, 2)), replication_factor=replicas, timeout=timeout
                    )
                )
            case "delete":
                error = await self.attempt(admin.delete_topic(self._topic, timeout=timeout))
            case "grow":
                error = await self.attempt(admin.create_partitions(self._topic, chance.choice((2, 3)), timeout=timeout))
            case "configure":
                name = chance.choice(sorted(CONFIGS))
                wanted = {name: chance.choice(CONFIGS[name])}
                error = await self.attempt(admin.alter_configs(topic=self._topic, set=wanted, timeout=timeout))
            case "describe":
                error = await self.attempt(admin.describe_topic(self._topic, timeout=timeout))
            case _:
                error = await self.attempt(self._list(admin, timeout))
        self._changing = False
        self.count(what if error is None else f"{what} fails")
        self._certain &= not self._unanswered
        if isinstance(error, RetriableError):
            self._certain &= what not in ("create", "delete")
        elif what in ("create", "delete") and not isinstance(error, InvalidReplicationFactor):
            self._there, self._told = what == "create", True

    async def _list(self, admin: aio.Admin, timeout: float) -> None:
        """What it was told to be there it sees, and what it was told to be gone it does not."""
        there = self._topic in await admin.list_topics(timeout=timeout)
        sure = self._certain and self._told
        if sure and there is not self._there:
            raise Violation(
                f"{self}: the last answer said that the topic {'exists' if self._there else 'is deleted'}, but "
                f"list_topics {'lists' if there else 'does not list'} it"
            )
        self.count("lists held against what was told" if sure else "lists")


class SendsToWhatComesAndGoes(Application):
    """An idempotent producer of a topic that is deleted and made again under its feet."""

    def __init__(self, simulation: ClusterSimulation, number: int, topic: str) -> None:
        super().__init__(simulation, number, f"producer of {topic}")
        self._topic = topic

    async def work(self) -> None:
        """Send, one after the other; what is acknowledged is there for as long as the topic."""
        options: dict[str, Any] = {**QUICK, "delivery_timeout_ms": 3_000, "max_block_ms": 1_000}
        async with aio.Producer(self.bootstrap, **options) as producer:
            writer = self.book.new_writer(str(self), idempotent=True, safe=False)
            for _ in range(self.random.choice((20, 10_000))):
                if self.winding_down:
                    return
                number = writer.sent
                writer.sent += 1
                try:
                    told = await (await producer.send(self._topic, Value(writer.number, number).encode()))
                except RaftlogError as error:
                    self.count(type(error).__name__)
                else:
                    self.count("acknowledged")
                    self.book.acknowledged_of_what_goes(writer, number, told)
                await self.think(longest_s=0.3)
