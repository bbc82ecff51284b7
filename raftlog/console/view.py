"""One user's view of the cluster: what brokers answer, asked for once in two seconds at most, however many look.

Each question has a name. `View.ask` returns its last answer if that is fresh, and asks otherwise; while one thread
asks, others wait for its answer. If brokers do not answer, the last answer stays and says since when it is old, so that
a page goes on while a broker is down. If no broker answers, no other question is asked for two seconds, nor while that
one is asked again. A question that takes long is asked more seldom: it costs a tenth of the time.

A page does not wait for long (`View.hurry`): it shows the values known by then, and is drawn again, whole, until none
is missing.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, TypeVar

import raftlog
from raftlog._core.descriptions import (
    ClusterDescription,
    GroupListing,
    HangingTransaction,
    LogDirDescription,
    PartitionDescription,
    PartitionLag,
    PartitionReplicas,
    QuorumDescription,
    TopicDescription,
    TransactionListing,
)
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.collect import collect
from raftlog._doctor.report import Report, examine
from raftlog.cli.partitions.health import is_under_replicated
from raftlog.console.rebalance import Rebalance
from raftlog.errors import (
    AuthorizationError,
    BrokerUnavailable,
    RaftlogError,
    RetriableError,
    SecurityDisabled,
    TopicAuthorizationFailed,
    UnknownTopicOrPartition,
)
from raftlog.security import AclOperation, ResourceType
from raftlog.types import TopicPartition

if TYPE_CHECKING:
    from raftlog.console.rights import Rights

T = TypeVar("T")

EVERY_S: Final = 2.0
"""The shortest time between two requests for the same thing."""
AHEAD_S: Final = 10.0
"""How long after that a page still shows the last answer at once, while the next one is asked for."""
SELDOM_S: Final = 15.0
"""The same for requests that cost brokers more: sizes of logs, the doctor."""
OLDEST_REPORT_S: Final = 60.0
"""The oldest examination that a page still shows: with its remedies it must be of the cluster as it is."""
RARELY_S: Final = 60.0
"""The same for a user's permissions for a resource: brokers check these in any case."""
SHARE: Final = 10.0
"""A question that took t seconds is not repeated for SHARE times t, but for `SELDOM_S` at most: one that waited for a
broker that was dying says nothing of what the next one takes."""
MOST_ANSWERS: Final = 500
HISTORY: Final = 300
"""Points of a plot."""
MOST_PLOTS: Final = 500
PATIENCE_MS: Final = 5_000
AT_A_TIME: Final = 8
SEARCHES_AT_A_TIME: Final = 4
MOST_SEARCHES: Final = 16
"""Of one user, those that wait for a thread included: the last of them begins within some twenty seconds."""
MOST_FOUND: Final = 8
"""Results of searches that a view keeps, besides those under way: each may have megabytes."""
AUDIT_TOPIC: Final = "__audit"
CLUSTER: Final = "cluster"
"""The question that any broker can answer."""
RECORDS: Final = "records "
"""Begins the names of searches."""


class TooManySearches(RetriableError):
    """`MOST_SEARCHES` are under way or wait."""


@dataclass(slots=True)
class Answer(Generic[T]):
    """What brokers answered. `value`: None if they never did. `error`: why the last request failed.

    `pending`: a newer answer is on its way, and the caller was in too much of a hurry to wait for it.
    """

    value: T | None = None
    at_s: float = float("-inf")
    error: RaftlogError | None = None
    asked_s: float = float("-inf")
    took_s: float = 0.0
    pending: bool = False

    @property
    def refused(self) -> bool:
        """Whether this user may not know."""
        return isinstance(self.error, AuthorizationError)


class Point(NamedTuple):
    """A point of a plot. `at_ms`: Unix time."""

    at_ms: int
    value: float


@dataclass(slots=True)
class Health:
    """How many topics (without internal ones) and partitions there are, and how many partitions have a problem."""

    topics: int = 0
    partitions: int = 0
    leaderless: int = 0
    under_replicated: int = 0
    offline_replicas: int = 0
    moving: int = 0


class Topics(NamedTuple):
    """All topics by name, in order, and what they add up to."""

    by_name: dict[str, TopicDescription]
    health: Health

    @classmethod
    def of(cls, topics: Iterable[TopicDescription]) -> Topics:
        """Return them. Topics whose partitions are alike share their descriptions: ten thousand topics stay small."""
        by_name: dict[str, TopicDescription] = {}
        health = Health()
        alike: dict[tuple[object, ...], PartitionDescription] = {}
        all_alike: dict[tuple[int, ...], list[PartitionDescription]] = {}
        for topic in topics:
            health.topics += not topic.internal
            parts = []
            for part in topic.partitions:
                health.partitions += 1
                health.leaderless += part.leader < 0
                health.under_replicated += is_under_replicated(part)
                health.offline_replicas += len(part.offline_replicas)
                health.moving += bool(part.adding_replicas or part.removing_replicas)
                parts.append(alike.setdefault(_fingerprint(part), part))
            key = tuple(map(id, parts))  # of objects that `alike` keeps
            by_name[topic.name] = topic._replace(partitions=all_alike.setdefault(key, parts))
        return cls(by_name, health)


def _fingerprint(part: PartitionDescription) -> tuple[object, ...]:
    return tuple(tuple(each) if isinstance(each, list) else each for each in part)


@dataclass(slots=True)
class BrokerSize:
    """What a broker's log directories hold, in bytes. `offline`: how many of them."""

    logs: int = 0
    usable: int = 0
    total: int = 0
    offline: int = 0


class Sizes(NamedTuple):
    """Sizes of logs, in bytes: of brokers, of partitions (their largest replica), of topics (one replica of each)."""

    of_broker: dict[int, BrokerSize]
    of_part: dict[TopicPartition, int]
    of_topic: dict[str, int]

    @classmethod
    def of(cls, dirs: Iterable[LogDirDescription]) -> Sizes:
        """Return the sizes in directories."""
        found = cls({}, {}, {})
        for each in dirs:
            size = found.of_broker.setdefault(each.broker_id, BrokerSize())
            size.total += each.total_bytes
            size.usable += each.usable_bytes if each.error is None else 0
            size.offline += each.error is not None
            for log in each.partitions:
                size.logs += log.size_bytes
                part = TopicPartition(log.topic, log.partition)
                found.of_part[part] = max(found.of_part.get(part, 0), log.size_bytes)
        for part, size_bytes in found.of_part.items():
            found.of_topic[part.topic] = found.of_topic.get(part.topic, 0) + size_bytes
        return found


@dataclass(slots=True)
class Hurry:
    """How long a page waits for all its answers. `until_s`: by the view's clock. `ran_out`: it went without some."""

    until_s: float
    ran_out: bool = False


_HURRY: Final[ContextVar[Hurry | None]] = ContextVar("hurry", default=None)


class _Slot:
    """A question. `asking`: while a thread asks it, or will as soon as one is free."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.answer: Answer[Any] = Answer()
        self.asking: Future[None] | None = None


class View:
    """The answers that one user gets. Thread-safe.

    `settings`: config of clients, with the user's login. `secret`: what the user has proved who they are with; only its
    equality counts here. `on_close`: called once the connections are closed. `make_admin`: for tests.
    """

    def __init__(
        self,
        bootstrap: str,
        settings: Mapping[str, object],
        make_admin: Callable[..., raftlog.Admin] = raftlog.Admin,
        now_s: Callable[[], float] = time.monotonic,
        *,
        secret: object = None,
        on_close: Callable[[], object] = lambda: None,
    ) -> None:
        self.bootstrap = bootstrap
        self.secret = secret
        self._on_close = on_close
        self.settings = dict(settings)
        self._now_s = now_s
        # Most questions need metadata first; they share what one of them has asked for.
        config = {"default.api.timeout.ms": PATIENCE_MS, "metadata.max.age.ms": round(EVERY_S * 1000), **settings}
        self.admin = make_admin(bootstrap, config=config)
        self._make_admin = make_admin
        self._mover: raftlog.Admin | None = None
        self._large = threading.Lock()
        """Questions about all topics take turns, so that what they need in memory does not add up."""
        self._slots: dict[str, _Slot] = {}
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="console")
        self._parts = ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="console-part")
        """For parts of a question: its own thread waits for them."""
        self._searches = ThreadPoolExecutor(SEARCHES_AT_A_TIME, thread_name_prefix="console-search")
        self._room = threading.Semaphore(MOST_SEARCHES)
        self._plots: dict[str, deque[Point]] = {}
        self._totals: dict[str, tuple[float, int]] = {}
        self._log_ends: dict[TopicPartition, int] = {}
        self._appended = 0
        self._epochs: deque[tuple[int, int, int]] = deque(maxlen=HISTORY)
        self._closed = False
        self.rebalance: Rebalance | None = None
        """The last plan that this user had carried out."""

    def close(self) -> None:
        """Close the connections. A rebalance begins no more moves."""
        if self.rebalance is not None:
            self.rebalance.stop()
        self._closed = True
        for pool in (self._pool, self._parts, self._searches):
            pool.shutdown(wait=False, cancel_futures=True)
        self.admin.close()
        if self._mover is not None:
            self._mover.close()
        self._on_close()

    def mover(self) -> raftlog.Admin:
        """Return the client that carries out a rebalance: it decides by what is, not by what was two seconds ago."""
        with self._lock:
            if self._mover is None:
                config = {"default.api.timeout.ms": PATIENCE_MS, **self.settings}
                self._mover = self._make_admin(self.bootstrap, config=config)
            return self._mover

    def prepare(self) -> None:
        """Ask for what takes longest beside the first page."""
        for question in (
            self.cluster,
            self.topics,
            self.sizes,
            self.records_appended,
            self.groups,
            self.quorum,
            self.audited,
        ):
            self._pool.submit(question)

    # Questions

    @contextmanager
    def hurry(self, patience_s: float) -> Iterator[Hurry]:
        """Within the block all of this thread's questions together wait for `patience_s` at most."""
        made = Hurry(self._now_s() + patience_s)
        before = _HURRY.set(made)
        try:
            yield made
        finally:
            _HURRY.reset(before)

    def ask(
        self,
        name: str,
        question: Callable[[], T],
        every_s: float = EVERY_S,
        *,
        ahead: bool = False,
        search: bool = False,
    ) -> Answer[T]:
        """Return the answer to a question: the last one if it is fresh, else a new one.

        `ahead`: an answer that was fresh less than `AHEAD_S` ago is returned at once, and the next one is asked for
        beside the page. For what takes long and is on pages that update themselves. In a `hurry`, a thread of the view
        asks. `search`: it is slow; such questions have threads of their own, and are refused when too many wait.
        """
        slot = self._slot(name)
        hurry = _HURRY.get()
        with slot.lock:
            last, began_s = slot.answer, self._now_s()
            fresh_s = max(every_s, min(SHARE * last.took_s, SELDOM_S))
            if began_s - last.asked_s < fresh_s:
                return last
            asking = slot.asking
            if asking is None and name != CLUSTER and (outage := self._outage()) is not None:
                slot.answer = Answer(last.value, last.at_s, outage, last.asked_s)
                return slot.answer
            early = ahead and last.error is None and began_s - last.asked_s < fresh_s + AHEAD_S
            beside = (early or hurry is not None) and not self._closed
            # A caller without a hurry asks by itself what still waits for a thread: so no thread waits for a thread.
            mine = not beside and (asking is None or asking.cancel())
            if mine or asking is None:
                if search and not mine and not self._room.acquire(blocking=False):
                    return replace(last, error=TooManySearches("too many searches are under way; try again soon"))
                asking = slot.asking = Future()
                if mine:
                    asking.set_running_or_notify_cancel()
                else:
                    if search:
                        asking.add_done_callback(lambda _: self._room.release())
                    (self._searches if search else self._pool).submit(self._answer, slot, asking, question)
        if early:
            return last
        if mine:
            self._answer(slot, asking, question)
        try:
            asking.result(None if hurry is None else max(0.0, hurry.until_s - self._now_s()))
        except (TimeoutError, CancelledError):
            assert hurry is not None, "callers without a hurry wait only for threads that ask"
            hurry.ran_out = True
            return replace(slot.answer, pending=True)
        return slot.answer

    def _answer(self, slot: _Slot, asking: Future[None], question: Callable[[], Any]) -> None:
        """Ask a question, unless a caller has taken it over."""
        if not asking.running() and not asking.set_running_or_notify_cancel():
            return
        try:
            found = self._asked(slot.answer, question)
        except BaseException as bug:
            slot.asking = None
            asking.set_exception(bug)
            return
        with slot.lock:
            slot.answer, slot.asking = found, None
        asking.set_result(None)

    def _asked(self, last: Answer[T], question: Callable[[], T]) -> Answer[T]:
        """Ask brokers. `last`: what they answered before."""
        began_s = self._now_s()
        try:
            value, at_s, error = question(), self._now_s(), None
        except RaftlogError as failed:
            # A refusal or "no such topic" makes the old answer wrong.
            keeps = isinstance(failed, RetriableError) and not isinstance(failed, UnknownTopicOrPartition)
            value, at_s, error = (last.value, last.at_s, failed) if keeps else (None, float("-inf"), failed)  # type: ignore[assignment] # T or None
        # A failure is slow, and is tried again all the same: the broker may be back.
        took_s = self._now_s() - began_s if error is None else 0.0
        return Answer(value, at_s, error, self._now_s(), took_s)

    def _outage(self) -> RaftlogError | None:
        """Return why no broker answered a moment ago, or the last time if brokers are being asked again: then a page
        does not wait for each of its questions in turn, and leaves the threads to `CLUSTER`."""
        slot = self._slot(CLUSTER)
        last = slot.answer
        recent = slot.asking is not None or self._now_s() - last.asked_s < EVERY_S
        return last.error if isinstance(last.error, RetriableError) and recent else None

    def _slot(self, name: str) -> _Slot:
        with self._lock:
            slot = self._slots.pop(name, None) or _Slot()
            self._slots[name] = slot  # the last used one comes last
            while len(self._slots) > MOST_ANSWERS:
                del self._slots[next(iter(self._slots))]
            return slot

    def forget(self) -> None:
        """Ask anew for everything: something was changed."""
        with self._lock:
            self._slots.clear()

    def age_s(self, answer: Answer[Any]) -> float:
        """Return how old an answer is."""
        return self._now_s() - answer.at_s

    def cluster(self) -> Answer[ClusterDescription]:
        """Ask for brokers and controller."""
        return self.ask(CLUSTER, lambda: self.admin.describe_cluster(include_authorized_operations=True), ahead=True)

    def operations(self, resource: ResourceType, name: str = "") -> frozenset[AclOperation] | None:
        """Return what this user may do with a resource (KIP-430); None: unknown, and the broker will say."""
        match resource:
            case ResourceType.CLUSTER:
                cluster = self.cluster().value
                return None if cluster is None else cluster.authorized_operations
            case ResourceType.TOPIC:

                def question() -> frozenset[AclOperation] | None:
                    return self.admin.describe_topic(name, include_authorized_operations=True).authorized_operations

            case ResourceType.GROUP:

                def question() -> frozenset[AclOperation] | None:
                    return self.admin.describe_group(name, include_authorized_operations=True).authorized_operations

            case ResourceType.TRANSACTIONAL_ID:

                def question() -> frozenset[AclOperation] | None:
                    found = self.admin.describe_transaction(name, include_authorized_operations=True)
                    return found.authorized_operations

            case _:
                return None
        return self.ask(f"may {resource.name} {name}", question, RARELY_S).value

    def may_create_topics(self) -> bool:
        """Whether there is a name under which this user may create a topic; True if brokers do not tell."""
        cluster = self.cluster().value
        return cluster is None or cluster.may_create_topics is not False

    def quorum(self) -> Answer[QuorumDescription]:
        """Ask for the metadata quorum."""
        return self.ask("quorum", self.admin.describe_quorum, ahead=True)

    def topics(self, *, ahead: bool = True) -> Answer[Topics]:
        """Ask for all topics, internal ones included. `ahead`: as `ask`."""

        def question() -> Topics:
            with self._large:
                return Topics.of(self.admin.describe_topics(internal=True))

        return self.ask("topics", question, ahead=ahead)

    def audited(self) -> Answer[bool]:
        """Ask whether the topic of audit records is there; refused if this user may not read it."""

        def question() -> bool:
            try:
                found = self.admin.describe_topics([AUDIT_TOPIC], internal=True, include_authorized_operations=True)
            except UnknownTopicOrPartition:
                return False
            may = found[0].authorized_operations
            if may is not None and AclOperation.READ not in may:
                raise TopicAuthorizationFailed(f"this needs Read on topic {AUDIT_TOPIC}")
            return True

        return self.ask("audited", question, RARELY_S, ahead=True)

    def topic(self, name: str) -> Answer[TopicDescription]:
        """Ask for one topic. A topic that brokers do not know is not waited for: it may never come."""
        return self.ask(f"topic {name}", lambda: self.admin.describe_topic(name, timeout=0))

    def rights(self) -> Answer[Rights]:
        """Ask for all that decides who may do what: users, ACLs, roles, and how a broker is configured."""

        def question() -> Rights:
            from raftlog.console.rights import Rights  # here: its tables take memory

            admin = self.admin
            brokers = [each.broker_id for each in admin.describe_cluster().brokers if not each.fenced]
            configs = admin.describe_node(min(brokers, default=1)).configs
            users = [each.user for each in admin.describe_users()]
            try:
                acls, roles = admin.describe_acls(), admin.describe_roles()
            except SecurityDisabled:  # without an authorizer there are none
                acls, roles = [], []
            return Rights.of(users, acls, roles, configs)

        return self.ask("rights", question, ahead=True)

    def replicas(self, topic: str) -> Answer[dict[TopicPartition, PartitionReplicas]]:
        """Ask leaders for the offsets of a topic's partitions; leaders that do not answer are left out."""
        return self.ask(f"replicas {topic}", lambda: self.admin.describe_replicas([topic], silent={}), ahead=True)

    def records_appended(self) -> Answer[int]:
        """Ask leaders how many records were appended since the first answer, to topics that are not internal.

        A partition counts from its second answer in a row: those of a leader that is lost and found are not a jump.
        """

        def question() -> int:
            with self._large:
                silent: dict[int, RaftlogError] = {}
                found = self.admin.describe_replicas(None, silent=silent)
            if silent and not found:
                raise next(iter(silent.values()))
            ends = {key: part.log_end_offset for key, part in found.items() if not part.topic.startswith("__")}
            before, self._log_ends = self._log_ends, ends
            self._appended += sum(max(0, end - before.get(key, end)) for key, end in ends.items())
            return self._appended

        return self.ask("log end", question, ahead=True)

    def sizes(self) -> Answer[Sizes]:
        """Ask for log directories and the sizes of partitions; brokers that do not answer are left out."""

        def question() -> Sizes:
            cluster = self.cluster()
            if cluster.value is None:
                raise cluster.error or BrokerUnavailable("no broker has answered yet")
            brokers = [each.broker_id for each in cluster.value.brokers if not each.fenced]
            found = self.each(brokers, self.admin.describe_log_dirs)
            if brokers and not any(isinstance(each, list) for each in found.values()):
                raise next(each for each in found.values() if isinstance(each, RaftlogError))
            return Sizes.of(each for dirs in found.values() if isinstance(dirs, list) for each in dirs)

        return self.ask("sizes", question, SELDOM_S, ahead=True)

    def groups(self) -> Answer[list[GroupListing]]:
        """Ask for all groups."""
        return self.ask("groups", lambda: self.admin.list_groups(missing=[]), ahead=True)

    def records(self, what: str, search: Callable[[], T]) -> Answer[T]:
        """Search records."""
        try:
            return self.ask(f"{RECORDS}{what}", search, search=True)
        finally:
            with self._lock:
                done = [name for name, each in self._slots.items() if name.startswith(RECORDS) and not each.asking]
                for name in done[:-MOST_FOUND]:  # the last used one comes last
                    del self._slots[name]

    def lag(self, group_id: str) -> Answer[dict[TopicPartition, PartitionLag]]:
        """Ask for the lag of a group."""
        return self.ask(f"lag {group_id}", lambda: self.admin.group_lag(group_id), ahead=True)

    def lags(self, group_ids: Iterable[str]) -> dict[str, dict[TopicPartition, PartitionLag]]:
        """Ask for the lags of several groups at once; groups without an answer are left out."""
        ids = list(group_ids)
        name = f"lags {' '.join(ids)}"
        return self.ask(name, lambda: self.admin.group_lags(ids, missing={}), ahead=True).value or {} if ids else {}

    def transactions(self) -> Answer[list[TransactionListing]]:
        """Ask for all transactional ids and open stages."""
        return self.ask("transactions", lambda: self.admin.list_transactions(missing=[]), ahead=True)

    def hanging(self) -> Answer[list[HangingTransaction]]:
        """Ask for hanging transactions, in all partitions."""

        def question() -> list[HangingTransaction]:
            with self._large:
                return self.admin.find_hanging_transactions(missing=[])

        return self.ask("hanging", question, SELDOM_S, ahead=True)

    def doctor(self) -> Answer[Report]:
        """Return the last examination of the cluster, if it is younger than `OLDEST_REPORT_S`.

        A new one, if it is due, goes on beside the page.
        """
        with self.hurry(0):
            last = self.ask("doctor", self._examined, SELDOM_S, ahead=True)
        return replace(last, value=None) if self.age_s(last) > OLDEST_REPORT_S else last

    def _examined(self) -> Report:
        with self._large:
            return examine(collect(self.admin, interval_s=0), CHECKS)

    def each(self, keys: Iterable[Any], question: Callable[[Any], T]) -> dict[Any, T | RaftlogError]:
        """Ask the same about several things at a time; the result of one that failed is its error."""

        def ask(key: Any) -> T | RaftlogError:
            try:
                return question(key)
            except RaftlogError as error:
                return error

        wanted = list(keys)
        return dict(zip(wanted, self._parts.map(ask, wanted), strict=True))

    # Plots

    def note_total(self, name: str, total: int) -> float | None:
        """Note a growing total, and return its growth per second since the last time; None the first time."""
        with self._lock:
            now_s = self._now_s()
            last = self._totals.get(name)
            if last is not None and now_s - last[0] < EVERY_S / 2:
                points = self._plots.get(name)
                return points[-1].value if points else None
            self._totals[name] = (now_s, total)
            if last is None:
                return None
            rate = max(0, total - last[1]) / (now_s - last[0])
        self.note(name, rate)
        return rate

    def note(self, name: str, value: float) -> None:
        """Add a point to a plot, unless the last one is younger than half of `EVERY_S`."""
        with self._lock:
            points = self._plots.pop(name, None) or deque(maxlen=HISTORY)
            self._plots[name] = points  # the last drawn one comes last
            while len(self._plots) > MOST_PLOTS:
                del self._plots[next(iter(self._plots))]
            now_ms = round(time.time() * 1000)
            if not points or now_ms - points[-1].at_ms >= EVERY_S * 500:
                points.append(Point(now_ms, value))

    def note_epoch(self, epoch: int, leader_id: int) -> None:
        """Note which controller leads in an epoch."""
        with self._lock:
            if not self._epochs or self._epochs[-1][1] != epoch:
                self._epochs.append((round(time.time() * 1000), epoch, leader_id))

    def epochs(self) -> list[tuple[int, int, int]]:
        """Return the epochs seen, the newest first: when first seen (Unix time in ms), epoch, controller."""
        with self._lock:
            return list(self._epochs)[::-1]

    def plot(self, name: str) -> list[Point]:
        """Return the points of a plot, the oldest first."""
        with self._lock:
            return list(self._plots.get(name, ()))
