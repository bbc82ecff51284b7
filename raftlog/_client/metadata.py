"""Keeps the view of the cluster fresh: one request at a time, whoever asks."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
from collections.abc import Callable
from typing import Final

from raftlog._client.connections import REFUSED_GRACE_S, Connections, NobodyListens, TlsFailed, nobody_answers
from raftlog._client.inquiry import Inquiry, NobodyAnswers
from raftlog._core.backoff import Pace, Pauses
from raftlog._core.cluster import BrokerView, ClusterCache, TopicView
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    RaftlogError,
    RetriableError,
    UnknownTopicOrPartition,
)
from raftlog.types import TopicPartition
from raftlog.v1 import common_pb2, metadata_pb2

logger = logging.getLogger(__name__)

_AT_MOST_EVERY_MS: Final = 100.0
NAMES_AT_A_TIME: Final = 4_000
"""Topics in one question: brokers take 10 000, and 1 MiB, which is 4 161 of the longest names."""
UNKNOWN_TOPIC_GRACE_S: Final = 2.0
"""A topic that brokers deny for this long does not exist; before, they may not have heard of it yet."""

_TOLD_AFTER_S: Final = 10.0
"""After so long without an answer the log says so."""


class _Outage:
    """Tells the log, once each time, that nobody answers for long, and when it is over."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._told = False

    def answered(self) -> None:
        """Somebody has answered."""
        if self._told:
            logger.warning("brokers answer again")
        self._since_s, self._told = None, False

    def failed(self, error: RaftlogError, asked_at_s: float, now_s: float) -> None:
        """Nobody has, to the question of that time; another one follows."""
        if self._since_s is None:
            self._since_s = asked_at_s
        if not self._told and isinstance(error, BrokerUnavailable) and now_s - self._since_s >= _TOLD_AFTER_S:
            logger.warning("%s; asking on, for %.0f s now", error, now_s - self._since_s)
            self._told = True


class MetadataCache:
    """`view` is what is known; `refresh` asks again. Tasks and calls live on one event loop.

    A background task, started with the first refresh, asks again every `max_age_ms`, and soon after
    `request_refresh`, with backoff while nobody answers, and at a `Pace` while something is missing.
    """

    def __init__(
        self,
        connections: Connections,
        bootstrap: list[str],
        *,
        max_age_ms: float,
        request_timeout_ms: float,
        pauses: Pauses,
    ) -> None:
        self.view = ClusterCache()
        self.wanted: set[str] = set()
        self.all_topics = False
        self.min_offset = 0
        """No answer from metadata older than this is wanted."""
        self.bootstrap = bootstrap
        self.last_error: RaftlogError | None = None
        self.refused_grace_s = math.inf
        """How long `topic` goes on when every address refuses the connection, and none has ever answered."""
        self._connections = connections
        self._max_age_s = max_age_ms / 1000
        self._request_timeout_s = request_timeout_ms / 1000
        self._pauses = pauses
        self._pace = Pace(random.random)
        self._inquiry = Inquiry(connections, self._request_timeout_s, self._notify)
        self._flight: asyncio.Task[None] | None = None
        self._keeper: asyncio.Task[None] | None = None
        self._stale = asyncio.Event()
        self._wanted_at_once = False
        self._missing_since_s: float | None = None
        """Since when is missing what was missed last, of all that a refresh was requested for."""
        self._probes: set[str] = set()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every answer, after every hint that was news, and when a broker falls silent."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def address(self, broker_id: int) -> str | None:
        """Return where a broker is reached."""
        broker = self.view.brokers.get(broker_id)
        return broker.address if broker is not None else None

    def leader(self, topic_partition: TopicPartition) -> BrokerView | None:
        """Return the broker that leads the partition, as far as is known."""
        return self.view.leader(*topic_partition)

    def silent_since(self, broker_id: int) -> float | None:
        """Return the loop's time since when a broker owes an answer that others give at once; None: it does not.

        A frozen process is like this: its streams are open and say nothing.
        """
        address = self.address(broker_id)
        return None if address is None else self._inquiry.silent_since(address)

    def learn(self, topic: str, partition: int, error: common_pb2.Error) -> None:
        """Learn from a refusal who leads now, or that it is time to ask."""
        if error.HasField("leader") and self.view.apply_hint(topic, partition, error.leader):
            asyncio.get_running_loop().call_soon(self._notify)  # not now: the caller is in the middle of something
            if error.leader.leader_id in self.view.brokers:
                return
        self.request_refresh()

    def request_refresh(self, *, missing_since_s: float | None = None, probe: int | None = None) -> None:
        """Ask again soon, in the background.

        With `missing_since_s` (the loop's time) somebody cannot go on before the cluster has changed: it is asked
        again after a share of the time that he has waited (`Pace`). He is to say so again after every answer that does
        not help. A broker named as `probe` is asked beside the others, whether it lives (`silent_since`).
        """
        if missing_since_s is None:
            self._wanted_at_once = True
        else:
            self._missing_since_s = max(missing_since_s, self._missing_since_s or missing_since_s)
        if probe is not None and (address := self.address(probe)) is not None:
            self._probes.add(address)
        self._stale.set()
        self._keep()

    def _keep(self) -> None:
        if self._keeper is None:
            self._keeper = asyncio.get_running_loop().create_task(self._keep_fresh())

    async def _keep_fresh(self) -> None:
        loop = asyncio.get_running_loop()
        failures = 0
        asked_at_s = loop.time()
        pause_ms = 0.0
        outage = _Outage()
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._max_age_s):
                    await self._stale.wait()
            while (left_s := asked_at_s + self._pause_ms(pause_ms, failures) / 1000 - loop.time()) > 0:
                self._stale.clear()
                with contextlib.suppress(TimeoutError):  # sooner, if somebody comes who has waited less
                    async with asyncio.timeout(left_s):
                        await self._stale.wait()
            self._stale.clear()
            self._wanted_at_once, self._missing_since_s = False, None
            began_s = loop.time()
            try:
                await self.refresh()
                failures = 0
                outage.answered()
                pause_ms = min(self._pauses.retry.pause_ms(1), _AT_MOST_EVERY_MS)
            except RaftlogError as error:
                failures += 1
                pause_ms = self._pauses.after_ms(error, failures)
                self._stale.set()
                logger.debug("metadata refresh failed: %s", error)
                outage.failed(error, began_s, loop.time())
            except Exception:  # one of ours, of who was told: nobody else must be left without metadata for ever
                logger.exception("what follows from new metadata failed")
            asked_at_s = loop.time()

    def _pause_ms(self, pause_ms: float, failures: int) -> float:
        """Return the pause after the last answer, for who is in the greatest hurry."""
        if failures or self._missing_since_s is None:
            return pause_ms
        missing_s = asyncio.get_running_loop().time() - self._missing_since_s
        pace_ms = self._pace.pause_ms(missing_s * 1000)
        return min(pause_ms, pace_ms) if self._wanted_at_once else pace_ms

    async def refresh(self) -> None:
        """Ask for the wanted topics; joins a request that is under way.

        Raises:
            BrokerUnavailable: nobody answered; names who was asked.
            AuthorizationError: the cluster does not let this user in, or ask.
        """
        self._keep()
        if self._flight is None:
            self._flight = asyncio.get_running_loop().create_task(self._ask())
            self._flight.add_done_callback(self._landed)
        await asyncio.shield(self._flight)

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flight = None
        if not flight.cancelled():
            flight.exception()  # waiters have it too; without waiters it is not worth a warning

    async def _ask(self) -> None:
        known = [broker.address for broker in self.view.brokers.values() if not broker.fenced]
        random.shuffle(known)
        addresses = list(dict.fromkeys([*known, *self.bootstrap]))
        all_topics = self.all_topics
        names = [] if all_topics else sorted(self.wanted)
        probes, self._probes = self._probes, set()
        for at in range(0, max(1, len(names)), NAMES_AT_A_TIME):
            await self._ask_for(names[at : at + NAMES_AT_A_TIME], addresses, probes, all_topics=all_topics)

    async def _ask_for(self, names: list[str], addresses: list[str], probes: set[str], *, all_topics: bool) -> None:
        request = metadata_pb2.MetadataRequest(
            topics=names,
            all_topics=all_topics,
            include_internal=all_topics,
            min_metadata_offset=self.min_offset,
        )
        try:
            response = await self._inquiry.ask(
                addresses, request, probes=probes, good_enough=lambda answer: not self.view.is_older(answer)
            )
        except NobodyAnswers as nobody:
            self.last_error = nobody_answers(addresses, nobody.reasons)
            raise self.last_error from None
        except AuthorizationError as refused:
            self.last_error = refused
            raise
        self.view.merge(response, all_topics=all_topics)
        self.last_error = None
        self._notify()

    def is_hopeless(self, error: RaftlogError, waited_s: float) -> bool:
        """Whether nobody has ever answered, and it is not to be expected after so long."""
        grace_s = min(self.refused_grace_s, REFUSED_GRACE_S) if isinstance(error, TlsFailed) else self.refused_grace_s
        return isinstance(error, NobodyListens) and not self.view.brokers and waited_s >= grace_s

    async def topic(self, name: str, timeout_ms: float, *, fresh: bool = False) -> TopicView:
        """Return the view of a topic, asking for it when it is not known. `fresh` asks in any case, and what it returns
        was answered to a question of after the call.

        Raises:
            UnknownTopicOrPartition, InvalidTopic: brokers say so, for longer than a new topic takes to get around.
            BrokerUnavailable: nobody answered within `timeout_ms`.
        """
        added = name not in self.wanted
        self.wanted.add(name)
        loop = asyncio.get_running_loop()
        started = loop.time()
        failures = 0
        while True:
            if not fresh and (found := self.view.topics.get(name)) is not None:
                return found
            error: RaftlogError
            try:
                if fresh and self._flight is not None:  # it was asked before
                    await asyncio.wait([self._flight])
                await self.refresh()
                fresh = False
                error = self.view.missing.get(name) or UnknownTopicOrPartition(f"there is no topic {name!r}")
            except RetriableError as refused:
                error = refused
            if not fresh and name in self.view.topics:
                continue
            waited_s = loop.time() - started
            if self.is_hopeless(error, waited_s):
                raise error
            denied = isinstance(error, UnknownTopicOrPartition)
            if (
                waited_s * 1000 >= timeout_ms
                or not isinstance(error, RetriableError)
                or (denied and waited_s >= UNKNOWN_TOPIC_GRACE_S)
            ):
                if denied and added:
                    self.wanted.discard(name)
                raise error
            failures += 1
            left_s = max(0.0, timeout_ms / 1000 - waited_s)
            await asyncio.sleep(min(self._pauses.after_ms(error, failures) / 1000, left_s))

    async def close(self) -> None:
        """Stop asking."""
        for task in (self._keeper, self._flight):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        await self._inquiry.close()
