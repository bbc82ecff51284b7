"""Metadata and offsets, as brokers answer them.

`Inquiry` asks several brokers for metadata and waits for no silent one; `MetadataCache` keeps the view of the cluster
fresh, one request at a time for all callers; `OffsetLookup` asks leaders for offsets, by time or by name.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import random
import time
from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Final, NamedTuple, Protocol

import grpc

from raftlog._client.connections import (
    REFUSED_GRACE_S,
    CertificateRefused,
    Connections,
    NobodyListens,
    TlsFailed,
    from_grpc,
)
from raftlog._core.backoff import Pace, Pauses
from raftlog._core.cluster import BrokerView, ClusterCache, TopicView
from raftlog.errors import (
    AuthorizationError,
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
from raftlog.v1 import common_pb2, log_pb2, log_pb2_grpc, metadata_pb2, metadata_pb2_grpc

logger = logging.getLogger(__name__)

HEDGE_S: Final = 0.2
"""After this long without an answer a broker is silent and the next one is asked too. Answers take milliseconds."""
_ADDRESS_TIMEOUT_S: Final = 3.0
"""How long one broker may take."""

_Answer = asyncio.Task[metadata_pb2.MetadataResponse]


class NobodyAnswers(Exception):
    """No broker has answered; `reasons` has the failure of each."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = reasons


class Inquiry:
    """Asks for metadata, takes the first answer, and learns which brokers are silent.

    A broker without an answer for `HEDGE_S` is silent until it answers or its connection breaks; a frozen process is
    such a broker, with open connections. It is asked again with later questions, but no caller waits for it. Its
    request stays open after another broker has answered, so that its first sign of life is noticed.
    It calls `on_change` whenever a broker falls silent, or ceases to be silent.
    """

    def __init__(self, connections: Connections, request_timeout_s: float, on_change: Callable[[], None]) -> None:
        self._silent: dict[str, float] = {}
        self._connections = connections
        self._timeout_s = min(_ADDRESS_TIMEOUT_S, request_timeout_s)
        self._on_change = on_change
        self._open: dict[str, _Answer] = {}
        """By address: a request that no caller waits for any more."""

    def silent_since(self, address: str) -> float | None:
        """Return the loop time of the first unanswered request to a silent broker, or None if it is not silent."""
        return self._silent.get(address)

    async def ask(
        self,
        addresses: Iterable[str],
        request: metadata_pb2.MetadataRequest,
        *,
        probes: Collection[str],
        good_enough: Callable[[metadata_pb2.MetadataResponse], bool],
    ) -> metadata_pb2.MetadataResponse:
        """Return the first answer that is `good_enough`, or else any answer.

        `probes` are asked too, to find out whether they live. Their answers count only if no other broker answers,
        because a leader that is cut off from the other brokers may not know of changes.

        Raises:
            AuthorizationError, InvalidRequestError: a broker refuses the request.
            NobodyAnswers: no broker is left to ask.
        """
        loop = asyncio.get_running_loop()
        wanted = list(dict.fromkeys(addresses))
        aside = dict.fromkeys(address for address in wanted if address in self._silent or address in probes)
        waiting = deque(address for address in wanted if address not in aside)
        asked = {self._start(each, request): each for each in aside if each not in self._open or not waiting}
        reasons: list[str] = []
        second_best: metadata_pb2.MetadataResponse | None = None
        next_at_s = loop.time()
        try:
            while True:
                if waiting and loop.time() >= next_at_s:
                    address = waiting.popleft()
                    asked[self._start(address, request)] = address
                    next_at_s = loop.time() + HEDGE_S
                if not waiting and aside.keys() >= set(asked.values()) and second_best is not None:
                    return second_best
                if not asked:
                    raise NobodyAnswers(reasons)
                limit_s = max(0.0, next_at_s - loop.time()) if waiting else None
                done, _ = await asyncio.wait(asked, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
                for answer in [each for each in asked if each in done]:
                    address = asked.pop(answer)
                    response = self._outcome(answer, address, reasons)
                    if address not in aside:
                        if response is not None and good_enough(response):
                            return response
                        next_at_s = loop.time()
                    second_best = second_best or response
        finally:
            self._leave_open(asked)

    def _start(self, address: str, request: metadata_pb2.MetadataRequest) -> _Answer:
        before = self._open.pop(address, None)
        if before is not None:
            before.cancel()
        return asyncio.get_running_loop().create_task(self._ask_one(address, request))

    async def _ask_one(self, address: str, request: metadata_pb2.MetadataRequest) -> metadata_pb2.MetadataResponse:
        loop = asyncio.get_running_loop()
        late = loop.call_later(HEDGE_S, self._falls_silent, address, loop.time())
        stub = metadata_pb2_grpc.MetadataStub(self._connections.channel(address))
        try:
            response: metadata_pb2.MetadataResponse = await stub.Get(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            reason = from_grpc(error, address)
            if not isinstance(reason, RequestTimedOut):
                self._is_heard(address)  # the connection has failed, so other streams notice too
            raise reason from None
        finally:
            late.cancel()
        self._is_heard(address)
        return response

    def _falls_silent(self, address: str, asked_at_s: float) -> None:
        if address not in self._silent:
            self._silent[address] = asked_at_s
            logger.debug("no answer from %s yet", address)
            self._on_change()

    def _is_heard(self, address: str) -> None:
        if self._silent.pop(address, None) is not None:
            logger.debug("%s is not silent any more", address)
            self._on_change()

    @staticmethod
    def _outcome(answer: _Answer, address: str, reasons: list[str]) -> metadata_pb2.MetadataResponse | None:
        """Return the response of a broker, or None if another one must be asked."""
        try:
            response = answer.result()
        except AuthorizationError:
            raise
        except RaftlogError as error:
            reasons.append(str(error))
            return None
        if not response.error.code:
            return response
        refusal = from_wire(response.error)
        if not isinstance(refusal, RetriableError):
            raise refusal
        reasons.append(f"{address}: {refusal}")
        return None

    def _leave_open(self, asked: dict[_Answer, str]) -> None:
        for answer, address in asked.items():
            self._open[address] = answer
            answer.add_done_callback(partial(self._closed, address))

    def _closed(self, address: str, answer: _Answer) -> None:
        if self._open.get(address) is answer:
            del self._open[address]
        if not answer.cancelled():
            answer.exception()  # retrieved: no caller waits for it

    async def close(self) -> None:
        """Cancel all requests."""
        left = list(self._open.values())
        for answer in left:
            answer.cancel()
        await asyncio.gather(*left, return_exceptions=True)


_AT_MOST_EVERY_MS: Final = 100.0
NAMES_AT_A_TIME: Final = 4_000
"""The most topics in one request: brokers accept 10 000, and 1 MiB, which holds 4 161 of the longest names."""
ALL_TOPICS_AGES: Final = 2
"""All topics are still wanted for this many times the age that metadata may have, after somebody asked for them."""
UNKNOWN_TOPIC_GRACE_S: Final = 2.0
"""A topic that stays unknown to brokers for this long does not exist; before, it may be new."""

_TOLD_AFTER_S: Final = 10.0
"""After this long without an answer the client logs a warning."""


class _Outage:
    """Logs once that no broker has answered for long, and once that brokers answer again."""

    def __init__(self) -> None:
        self._since_s: float | None = None
        self._told = False

    def answered(self) -> None:
        """A broker has answered."""
        if self._told:
            logger.warning("brokers answer again")
        self._since_s, self._told = None, False

    def failed(self, error: RaftlogError, asked_at_s: float, now_s: float) -> None:
        """No broker has answered the request of `asked_at_s`; another request follows."""
        if self._since_s is None:
            self._since_s = asked_at_s
        if not self._told and isinstance(error, BrokerUnavailable) and now_s - self._since_s >= _TOLD_AFTER_S:
            logger.warning("%s; retrying for %.0f s now", error, now_s - self._since_s)
            self._told = True


class _Question(NamedTuple):
    """What one refresh asks brokers for."""

    names: frozenset[str]
    all_topics: bool
    min_offset: int

    def covers(self, later: _Question) -> bool:
        """Whether the answer tells all that `later` asks for."""
        return self.min_offset >= later.min_offset and (
            self.all_topics or (not later.all_topics and self.names >= later.names)
        )


class MetadataCache:
    """The metadata of one client: `view` is the latest, `refresh` asks for newer. Lives on one event loop.

    A background task, started by the first refresh, asks again every `max_age_ms`, and soon after `request_refresh`:
    with backoff while no broker answers, and at a `Pace` while a caller waits for a change.
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
        """Brokers answer with metadata of this offset or later."""
        self.bootstrap = bootstrap
        self.last_error: RaftlogError | None = None
        self.refused_grace_s = math.inf
        """How long `topic` retries while all addresses refuse the connection and none has ever answered."""
        self._connections = connections
        self._max_age_s = max_age_ms / 1000
        self._request_timeout_s = request_timeout_ms / 1000
        self._pauses = pauses
        self._pace = Pace(random.random)
        self._inquiry = Inquiry(connections, self._request_timeout_s, self._notify)
        self._flight: asyncio.Task[None] | None = None
        self._asked = _Question(frozenset(), all_topics=False, min_offset=0)
        """What the request under way asks for."""
        self._due: set[str] = set()
        """Topics that callers wait to ask for until the present request ends. The next request names all of them."""
        self._answered_s: dict[str, float] = {}
        """By topic: the loop time at which the last answered request that named it was sent."""
        self._all_answered_s = self._any_answered_s = -math.inf
        """The same of the last answered request for all topics, and of the last answered one, whatever it named."""
        self._all_wanted_s = -math.inf
        """The loop time at which a caller last wanted all topics."""
        self._keeper: asyncio.Task[None] | None = None
        self._stale = asyncio.Event()
        self._wanted_at_once = False
        self._missing_since_s: float | None = None
        """The latest `missing_since_s` of the requested refreshes."""
        self._probes: set[str] = set()
        self._listeners: list[Callable[[], None]] = []

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after every response and leader hint, and when a broker becomes or ceases to be silent."""
        self._listeners.append(listener)

    def _notify(self) -> None:
        for listener in self._listeners:
            listener()

    def address(self, broker_id: int) -> str | None:
        """Return the address of a broker, or None if it is unknown."""
        broker = self.view.brokers.get(broker_id)
        return broker.address if broker is not None else None

    def leader(self, topic_partition: TopicPartition) -> BrokerView | None:
        """Return the leader of the partition, or None if it is unknown."""
        return self.view.leader(*topic_partition)

    def silent_since(self, broker_id: int) -> float | None:
        """Return the loop time since when a broker is silent (see `Inquiry`), or None if it is not.

        The open streams of a frozen process do not show this.
        """
        address = self.address(broker_id)
        return None if address is None else self._inquiry.silent_since(address)

    def learn(self, topic: str, topic_id: bytes, partition: int, error: common_pb2.Error) -> None:
        """Apply the leader hint of a refusal, or request a refresh. `topic_id`: the topic of the refused request."""
        if error.HasField("leader") and self.view.apply_hint(topic, topic_id, partition, error.leader):
            asyncio.get_running_loop().call_soon(self._notify)  # later: the caller may hold its lock
            if error.leader.leader_id in self.view.brokers:
                return
        self.request_refresh()

    def request_refresh(self, *, missing_since_s: float | None = None, probe: int | None = None) -> None:
        """Ask again soon, in the background.

        With `missing_since_s` (loop time) the caller waits for a change of the cluster: the next request follows after
        a share of the time that it has waited (`Pace`). The caller repeats this after every refresh that does not help.
        The broker `probe` is asked too, to find out whether it lives (`silent_since`).
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
                with contextlib.suppress(TimeoutError):  # sooner, if a caller comes that has waited less
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
            except Exception:  # a bug in a listener must not end the refreshes
                logger.exception("a listener for new metadata failed")
            asked_at_s = loop.time()

    def _pause_ms(self, pause_ms: float, failures: int) -> float:
        """Return the pause after the last response, for the most urgent caller."""
        if failures or self._missing_since_s is None:
            return pause_ms
        missing_s = asyncio.get_running_loop().time() - self._missing_since_s
        pace_ms = self._pace.pause_ms(missing_s * 1000)
        return min(pause_ms, pace_ms) if self._wanted_at_once else pace_ms

    async def refresh(
        self, names: Collection[str] | None = None, *, all_topics: bool = False, max_age_s: float = 0.0
    ) -> None:
        """Ask for these topics (None: the wanted ones), or for all; or join a request that asks for as much.

        With `max_age_s`, do nothing if what is known is at most that old and includes the client's own changes.

        Raises:
            BrokerUnavailable: no broker answered; the message names the addresses.
            AuthorizationError: the cluster refuses this user.
        """
        if all_topics:
            self._all_wanted_s = asyncio.get_running_loop().time()
        if not self.is_known(max_age_s, names, all_topics=all_topics):
            await self._answer(self._question(names, all_topics=all_topics or self._is_all_wanted(max_age_s)))

    def _is_all_wanted(self, max_age_s: float) -> bool:
        """Whether a caller asks for all topics every so often: one answer then serves those that ask for some, too."""
        since_s = asyncio.get_running_loop().time() - ALL_TOPICS_AGES * max_age_s
        return max_age_s > 0 and self._all_wanted_s >= since_s

    async def _answer(self, question: _Question) -> None:
        """Ask, or join a request that is under way and asks for as much."""
        self._keep()
        while self._flight is not None and not self._asked.covers(question):
            self._due |= question.names
            await asyncio.wait([self._flight])
        if self._flight is None:
            self._asked = question._replace(names=question.names | self._due, min_offset=self.min_offset)
            self._due.clear()
            self._flight = asyncio.get_running_loop().create_task(self._ask())
            self._flight.add_done_callback(self._landed)
        await asyncio.shield(self._flight)

    def _question(self, names: Collection[str] | None = None, *, all_topics: bool = False) -> _Question:
        wanted = self.wanted if names is None else names
        return _Question(frozenset(wanted), self.all_topics or all_topics, self.min_offset)

    def is_known(self, max_age_s: float, names: Collection[str] | None = None, *, all_topics: bool = False) -> bool:
        """Whether what is known of these topics (None: the wanted ones), or of all, is no older; False for 0."""
        if max_age_s <= 0 or self.view.metadata_offset < self.min_offset:
            return False
        since_s = asyncio.get_running_loop().time() - max_age_s
        if self._all_answered_s >= since_s:
            return True
        if all_topics or self.all_topics or self._any_answered_s < since_s:
            return False
        return all(
            self._answered_s.get(name, -math.inf) >= since_s for name in (self.wanted if names is None else names)
        )

    def expire(self) -> None:
        """Use nothing of what is known instead of asking: an error has shown that it may be wrong."""
        self._answered_s.clear()
        self._all_answered_s = self._any_answered_s = self._all_wanted_s = -math.inf

    def _landed(self, flight: asyncio.Task[None]) -> None:
        self._flight = None
        if not flight.cancelled():
            flight.exception()  # retrieved: without waiters it is not worth a warning

    async def _ask(self) -> None:
        question, asked_s = self._asked, asyncio.get_running_loop().time()
        known = [broker.address for broker in self.view.brokers.values() if not broker.fenced]
        random.shuffle(known)
        addresses = list(dict.fromkeys([*known, *self.bootstrap]))
        names = [] if question.all_topics else sorted(question.names)
        probes, self._probes = self._probes, set()
        for at in range(0, max(1, len(names)), NAMES_AT_A_TIME):
            await self._ask_for(question, names[at : at + NAMES_AT_A_TIME], addresses, probes)
        self._any_answered_s = asked_s
        self._answered_s.update(dict.fromkeys(question.names, asked_s))
        if question.all_topics:
            self._all_answered_s = asked_s

    async def _ask_for(self, question: _Question, names: list[str], addresses: list[str], probes: set[str]) -> None:
        request = metadata_pb2.MetadataRequest(
            topics=names,
            all_topics=question.all_topics,
            include_internal=question.all_topics,
            min_metadata_offset=question.min_offset,
        )
        try:
            response = await self._inquiry.ask(
                addresses, request, probes=probes, good_enough=lambda answer: not self.view.is_older(answer)
            )
        except NobodyAnswers as failure:
            self.last_error = await self._connections.unavailable(addresses, failure.reasons)
            raise self.last_error from None
        except AuthorizationError as refused:
            self.last_error = refused
            raise
        self.view.merge(response, all_topics=question.all_topics)
        self.last_error = None
        self._notify()

    def is_hopeless(self, error: RaftlogError, waited_s: float) -> bool:
        """Whether no broker has ever answered, and after this wait none is expected to."""
        grace_s = self.refused_grace_s
        if isinstance(error, TlsFailed):
            grace_s = 0.0 if isinstance(error, CertificateRefused) else min(grace_s, REFUSED_GRACE_S)
        return isinstance(error, NobodyListens) and not self.view.brokers and waited_s >= grace_s

    async def topic(
        self,
        name: str,
        timeout_ms: float,
        *,
        fresh: bool = False,
        max_age_s: float = 0.0,
        along: Collection[str] = (),
    ) -> TopicView:
        """Return the view of a topic; ask if it is not known.

        With `fresh`, always send a request and use its answer, unless what is known is at most `max_age_s` old. A
        request asks for the topics `along` too: the caller wants these next.

        Raises:
            UnknownTopicOrPartition, InvalidTopic: brokers say so for UNKNOWN_TOPIC_GRACE_S.
            BrokerUnavailable: no broker answered within `timeout_ms`.
        """
        added = name not in self.wanted
        self.wanted.add(name)
        fresh = fresh and not self.is_known(max_age_s, (name,))
        loop = asyncio.get_running_loop()
        started = loop.time()
        failures = 0
        while True:
            if not fresh and (found := self.view.topics.get(name)) is not None:
                return found
            error: RaftlogError
            try:
                if fresh and max_age_s <= 0 and self._flight is not None:  # sent before this call
                    await asyncio.wait([self._flight])
                # An answer about all topics does not say why one is missing: that is asked for by name.
                # Only this topic is asked for: a client that comes to know thousands would ask for all with each.
                all_topics = fresh and self._is_all_wanted(max_age_s)
                await self._answer(self._question({name, *along}, all_topics=all_topics))
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


PARTS_AT_A_TIME: Final = 5_000
"""The most partitions in one request; brokers accept twice as many."""
LATEST: Final = -1
EARLIEST: Final = -2
LARGEST_TIMESTAMP: Final = -3
STRAGGLER_GRACE_S: Final = 2.0
"""How long partitions without an answer may delay those that have one. Most changes of leader take less; partitions
that take longer are read later."""
_PATIENCE_S: Final = 0.5
"""After this long without an answer, check whether the broker still leads; then every `_LOOK_S`."""
_LOOK_S: Final = 0.05


class LookupOptions(Protocol):
    """The options that a look-up needs."""

    @property
    def default_api_timeout_ms(self) -> float: ...
    @property
    def request_timeout_ms(self) -> float: ...
    @property
    def pauses(self) -> Pauses: ...


def monotonic_ms() -> float:
    """Return the monotonic clock in milliseconds."""
    return time.monotonic() * 1000.0


class AtOffset(int):
    """An offset in place of a time: asks for the first record at or after it."""


Answer = OffsetAndTimestamp | None | RaftlogError
"""An offset, None if there is no such record, or the error of the partition."""


def may_pass(error: RaftlogError) -> bool:
    """Whether a retry may succeed after this error."""
    return isinstance(error, (RetriableError, FencedError))


class OffsetLookup:
    """`Log.ListOffsets` at the leaders, with an answer or an error for each partition."""

    def __init__(self, metadata: MetadataCache, connections: Connections, options: LookupOptions) -> None:
        self._metadata = metadata
        self._connections = connections
        self._options = options

    async def find(
        self, timestamps_ms: Mapping[TopicPartition, int], isolation: common_pb2.IsolationLevel.ValueType
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return for each partition the first offset at or after the time (or LATEST, EARLIEST, LARGEST_TIMESTAMP), or
        None if there is no such record.

        Raises:
            RaftlogError: the error of a partition, if it is final or lasts for `default.api.timeout.ms`.
        """
        loop = asyncio.get_running_loop()
        started = loop.time()
        deadline = started + self._options.default_api_timeout_ms / 1000
        topics = dict.fromkeys(topic_partition.topic for topic_partition in timestamps_ms)
        for topic in topics:
            await self._metadata.topic(topic, self._options.default_api_timeout_ms, along=topics)
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
        """As `find`, but return the errors of partitions that do not answer.

        After the first answer it waits for the others for `grace_s` at most. Without `raises` it returns final errors
        too, even if no partition has answered.

        Raises:
            RaftlogError: a partition refuses for good, or none has answered within `patience_s` (by default
                `default.api.timeout.ms`).
        """
        loop = asyncio.get_running_loop()
        patience_s = self._options.default_api_timeout_ms / 1000 if patience_s is None else patience_s
        until = loop.time() + patience_s
        topics = dict.fromkeys(topic_partition.topic for topic_partition in timestamps_ms)
        for topic in topics:
            await self._metadata.topic(topic, patience_s * 1000, along=topics)
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
        """Ask all leaders for the partitions that are not in `found`; return the errors."""
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
        """Return the partitions by leader, and errors for those without a known leader."""
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
            return self._unreached(wanted, BrokerUnavailable(f"broker {node_id} is no longer part of the cluster"))
        answers: dict[TopicPartition, Answer] = {}
        asked = []
        topic_ids = []
        request = log_pb2.ListOffsetsRequest(isolation_level=isolation)
        for part, timestamp_ms in wanted.items():
            topic = self._metadata.view.topics.get(part.topic)
            view = self._metadata.view.partition(part)
            if topic is None or view is None:
                answers[part] = UnknownTopicOrPartition(f"{part} does not exist")
                continue
            asked.append(part)
            topic_ids.append(topic.topic_id)
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
        for part, topic_id, result in zip(asked, topic_ids, response.results, strict=True):
            if result.HasField("error") and result.error.code:
                answers[part] = from_wire(result.error)
                self._metadata.learn(part.topic, topic_id, part.partition, result.error)
            elif result.offset < 0:
                answers[part] = None
            else:
                answers[part] = OffsetAndTimestamp(result.offset, result.timestamp_ms, result.leader_epoch)
        return answers

    async def _while_it_leads(
        self, call: Awaitable[log_pb2.ListOffsetsResponse], node_id: int, asked: Iterable[TopicPartition]
    ) -> log_pb2.ListOffsetsResponse:
        """Wait for the answer of a broker, as long as it leads the partitions.

        Raises:
            BrokerUnavailable: another broker leads one of them now.
        """
        loop = asyncio.get_running_loop()
        started_s = loop.time()
        answer = asyncio.ensure_future(call)
        patience_s = _PATIENCE_S
        try:
            while not (await asyncio.wait([answer], timeout=patience_s))[0]:
                leaders = [self._metadata.leader(part) for part in asked]
                if any(leader is not None and leader.broker_id != node_id for leader in leaders):
                    raise BrokerUnavailable(f"broker {node_id} does not answer, and no longer leads")
                self._metadata.request_refresh(missing_since_s=started_s, probe=node_id)
                patience_s = _LOOK_S
            return answer.result()
        finally:
            answer.cancel()

    def _unreached(self, wanted: Iterable[TopicPartition], error: RaftlogError) -> dict[TopicPartition, Answer]:
        self._metadata.request_refresh()
        return dict.fromkeys(wanted, error)
