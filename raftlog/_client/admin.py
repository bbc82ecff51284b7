"""The admin client's engine: topics, the cluster, configs, replicas, groups, transactions, users and nodes.

A call goes to any broker, to a named broker, or to a coordinator; retriable errors are retried until its timeout.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import shlex
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from itertools import islice, zip_longest
from types import MappingProxyType
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import grpc

from raftlog._client.connections import (
    REFUSED_GRACE_S,
    CertificateRefused,
    NobodyListens,
    client_id_metadata,
    connections,
    from_grpc,
)
from raftlog._client.coordinators import TRANSACTIONS, Coordinator, Coordinators
from raftlog._client.groups import Entry, checked, in_pieces, to_commit
from raftlog._client.metadata import EARLIEST, LARGEST_TIMESTAMP, LATEST, Answer, AtOffset, MetadataCache, OffsetLookup
from raftlog._client.options import AdminOptions
from raftlog._client.tracing_choice import call_metadata
from raftlog._core.cluster import BrokerView, TopicView
from raftlog._core.descriptions import (
    ONGOING,
    OPEN_STATES,
    STATE_NUMBERS,
    STATES,
    ClusterDescription,
    ConfigDescription,
    GroupDescription,
    GroupListing,
    HangingTransaction,
    LogDirDescription,
    LogDirPartition,
    NodeDescription,
    PartitionLag,
    PartitionProducers,
    PartitionReplicas,
    QuorumDescription,
    Reassignment,
    SinkDescription,
    SinkListing,
    StageDescription,
    TopicDescription,
    TransactionDescription,
    TransactionListing,
    describe,
    describe_cluster,
    describe_group,
    describe_node,
    describe_producers,
    describe_quorum,
    describe_replicas,
    describe_sink,
    describe_transaction,
    operations_of,
    state_name,
    transaction_state_name,
    type_name,
)
from raftlog._core.metrics import CallMetrics, Metrics, rate_and_total
from raftlog.errors import (
    BrokerUnavailable,
    ClosedError,
    CoordinatorNotAvailable,
    DuplicateResource,
    EligibleLeadersNotAvailable,
    FencedError,
    GroupIdNotFound,
    InvalidGroupId,
    InvalidPartitions,
    InvalidRequestError,
    InvalidTxnState,
    LeaderNotAvailable,
    NonEmptyGroup,
    NotCoordinator,
    NotEnoughReplicas,
    PreferredLeaderNotAvailable,
    RaftlogError,
    RequestTimedOut,
    ResourceNotFound,
    RetriableError,
    ShuttingDown,
    TransactionalIdNotFound,
    UnacceptableCredential,
    UnknownMemberId,
    UnknownTopicOrPartition,
    UnsupportedVersion,
    from_wire,
)
from raftlog.security import (
    AclBinding,
    AclFilter,
    AclOperation,
    AclPermission,
    PatternType,
    QuotaEntity,
    ResourceType,
    Role,
    ScramMechanism,
    UserScramCredential,
)
from raftlog.types import OffsetAndMetadata, OffsetAndTimestamp, TopicPartition
from raftlog.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    common_pb2,
    group_pb2,
    group_pb2_grpc,
    log_pb2,
    log_pb2_grpc,
    metadata_pb2,
    metadata_pb2_grpc,
    node_pb2,
    node_pb2_grpc,
    records_pb2,
    security_pb2,
    security_pb2_grpc,
    transaction_pb2,
)

T = TypeVar("T")
Service = Callable[[grpc.aio.Channel], Any]

_ADDRESS_TIMEOUT_S: Final = 5.0
_DEADLINE_MARGIN_S: Final = 0.1
_METADATA_REFRESH_MS: Final = 300_000
_FIRST_CONTACT_S: Final = 5.0
"""The time limit for addresses that have never answered: they are more likely wrong than late."""


def names_of(given: str | Iterable[str]) -> list[str]:
    """Return the names, each once; a string counts as one name."""
    return [given] if isinstance(given, str) else list(dict.fromkeys(given))


def admin_stub(channel: grpc.aio.Channel) -> Any:
    """Return the stub of the service that most calls go to."""
    return admin_pb2_grpc.AdminStub(channel)


MAX_REASSIGNMENTS_PER_REQUEST: Final = 500
LEADERS_SHARE: Final = 0.8
"""The share of the remaining time in which leaders may answer, so that a frozen one does not fail the whole call."""


OFFSETS_TOPIC: Final = "__consumer_offsets"
_MAX_GROUP_ID: Final = 255


def _state(name: str) -> group_pb2.GroupState.ValueType:
    if name.lower() not in STATES:
        raise InvalidRequestError(f"there is no state {name!r} of a group; there are {', '.join(STATES)}")
    return group_pb2.GroupState.Value(name.upper())


def _checked(group_ids: Iterable[str]) -> list[str]:
    """Return the ids, each once.

    Raises:
        InvalidGroupId: not one to 255 characters.
    """
    wanted = names_of(group_ids)
    for group_id in wanted:
        if not 1 <= len(group_id) <= _MAX_GROUP_ID:
            raise InvalidGroupId(f"a group's name has 1 to {_MAX_GROUP_ID} characters, this one has {len(group_id)}")
    return wanted


def _not_empty(group_id: str) -> NonEmptyGroup:
    return NonEmptyGroup(f"group {group_id!r} has members, which know better how far they are; stop them first")


def _raise_first(refused: Sequence[RaftlogError], total: int) -> None:
    if refused:
        were = "was refused" if len(refused) == 1 else "were refused, this is the first"
        more = f"; {len(refused)} of {total} {were}" if total > 1 else ""
        raise type(refused[0])(f"{refused[0]}{more}")


_LOOK_UP_PATIENCE_S: Final = 5.0
"""The time limit for asking leaders for the ends of partitions; without these, committed offsets are still shown."""
_BY_NAME: Final = {"earliest": EARLIEST, "latest": LATEST, "max_timestamp": LARGEST_TIMESTAMP}


class _Place(NamedTuple):
    """The start and end of a partition, and the first record that a group has not read; None: there is none."""

    start: Answer
    end: Answer
    first_unread: Answer

    @property
    def error(self) -> RaftlogError | None:
        """The reason why one of the offsets is unknown, or None."""
        return next((each for each in self if isinstance(each, RaftlogError)), None)


_Committed: TypeAlias = dict[TopicPartition, group_pb2.CommittedOffset]


def _in_order(offsets: Iterable[group_pb2.CommittedOffset]) -> _Committed:
    known = {
        TopicPartition(each.topic, each.partition): each for each in offsets if not each.error.code and each.offset >= 0
    }
    return dict(sorted(known.items()))


def _first_unread(offset: int | None, start: Answer, end: Answer) -> int | None:
    """Return the offset of a group's first unread record; None: unknown, or it has read all."""
    if offset is None or not isinstance(start, OffsetAndTimestamp) or not isinstance(end, OffsetAndTimestamp):
        return None
    first = max(offset, start.offset)
    return first if first < end.offset else None


def _described_configs(entries: Iterable[admin_pb2.ConfigEntry]) -> dict[str, ConfigDescription]:
    return {
        entry.key: ConfigDescription(
            entry.key,
            entry.value,
            admin_pb2.ConfigEntry.Source.Name(entry.source).lower(),
            entry.read_only,
            entry.documentation,
        )
        for entry in entries
    }


def _lag(committed: group_pb2.CommittedOffset | None, place: _Place, member_id: str, now_ms: float) -> PartitionLag:
    start = place.start.offset if isinstance(place.start, OffsetAndTimestamp) else None
    end = place.end.offset if isinstance(place.end, OffsetAndTimestamp) else None
    lag: int | None = None
    seconds: float | None = None
    error = str(place.error) if place.error is not None else None
    if committed is not None and end is not None and committed.offset > end:
        error = (
            f"{committed.topic}-{committed.partition}: the committed offset {committed.offset} is beyond the log end "
            f"{end}: records were lost, or the topic was deleted and created again; the group continues at its "
            "auto.offset.reset"
        )
    elif committed is not None and start is not None and end is not None:
        lag = max(0, end - max(committed.offset, start))
        if lag == 0 or place.first_unread is None:  # retention has deleted the unread records
            seconds = 0.0
        elif isinstance(place.first_unread, OffsetAndTimestamp):
            seconds = max(0.0, (now_ms - place.first_unread.timestamp_ms) / 1000)
    return PartitionLag(
        committed.offset if committed is not None else None,
        start,
        end,
        lag,
        seconds,
        committed.metadata if committed is not None else "",
        committed.committed_at_ms if committed is not None else None,
        member_id,
        error,
    )


def _which(which: int | str) -> int:
    if isinstance(which, str) and which in _BY_NAME:
        return _BY_NAME[which]
    if isinstance(which, str) or which < 0:
        raise InvalidRequestError(f"{which!r}: name a time in ms, or one of {', '.join(_BY_NAME)}")
    return which


K = TypeVar("K")
V = TypeVar("V")

STATE_TOPIC: Final = "__transaction_state"
_AT_A_TIME: Final = 32
_GROUPS_AT_A_TIME: Final = 8
"""The number of groups whose offsets are requested at the same time; a group may have very many offsets."""
_NAMES_AT_A_TIME: Final = 5_000
"""The most topics or groups that one request names."""


def abort_stages_command(sink_id: str, batch_id: int | None = None) -> str:
    """Return the command that ends the open stages of a sink, or of one of its batches."""
    return f"raftlog txn abort-stages {shlex.quote(sink_id)}" + ("" if batch_id is None else f" --batch {batch_id}")


def _transaction_state(name: str) -> transaction_pb2.TransactionState.ValueType:
    if name.lower() not in STATE_NUMBERS:
        raise InvalidRequestError(f"there is no state {name!r} of a transaction; there are {', '.join(STATE_NUMBERS)}")
    return STATE_NUMBERS[name.lower()]


async def _each_transaction(keys: Iterable[K], make: Callable[[K], Awaitable[V]]) -> dict[K, V]:
    """Return the result of `make` for each key; a limited number of calls run at a time."""
    found: dict[K, V] = {}
    waiting = iter(keys)
    while some := list(islice(waiting, _AT_A_TIME)):
        found |= zip(some, await asyncio.gather(*map(make, some)), strict=True)
    return found


_PARTITIONS_PER_REQUEST: Final = 1_000
_PATIENCE_S: Final = 3.0
"""How long to ask leaders for optional parts of an answer."""


class _Known(NamedTuple):
    """The open transactions that coordinators know: producer ids of stages, and partitions of transactions."""

    stages: set[int]
    parts: dict[int, set[TopicPartition]]

    def has(self, producer_id: int, part: TopicPartition) -> bool:
        """Whether a coordinator may still end the transaction that is open there."""
        return producer_id in self.stages or part in self.parts.get(producer_id, ())


def _open_at(found: Mapping[TopicPartition, PartitionProducers]) -> Iterator[HangingTransaction]:
    """Yield the open transactions, hanging or not."""
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


MIN_ITERATIONS: Final = 4096
MAX_ITERATIONS: Final = 1_000_000
"""The bounds that servers accept."""

B = TypeVar("B", AclBinding, AclFilter)
Choice = TypeVar("Choice", bound=enum.IntEnum)


def security_stub(channel: grpc.aio.Channel) -> Any:
    """Return the stub of the service for users and permissions."""
    return security_pb2_grpc.SecurityStub(channel)


def credential(user: str, password: str, mechanism: ScramMechanism, iterations: int) -> security_pb2.ScramCredential:
    """Return the credential of a password for brokers: a fresh salt and two keys (RFC 5802). Takes some milliseconds.

    Raises:
        UnacceptableCredential: the password is empty or has characters that SASLprep forbids, or the iterations are
            out of bounds.
    """
    import scramp  # here, because most programs manage no users

    if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
        raise UnacceptableCredential(
            f"iterations={iterations} of user {user!r}: expected {MIN_ITERATIONS} to {MAX_ITERATIONS}"
        )
    if not password:
        raise UnacceptableCredential(f"the password of user {user!r} is empty")
    try:
        made = scramp.ScramMechanism(mechanism.mechanism_name)
        salt, stored_key, server_key, _ = made.make_auth_info(password, iteration_count=iterations)
    except scramp.ScramException as error:  # names neither the password nor a part of it
        raise UnacceptableCredential(f"user {user!r}: {error}") from None
    return security_pb2.ScramCredential(
        user=user,
        mechanism=security_pb2.ScramMechanism.ValueType(mechanism),
        salt=salt,
        stored_key=stored_key,
        server_key=server_key,
        iterations=iterations,
    )


def _each_change(given: B | Iterable[B], kind: type[B]) -> list[B]:
    """Return the changes as a list; a single change counts as a list of one."""
    return [given] if isinstance(given, kind) else list(given)  # type: ignore[arg-type] # the other case is left


def _user_mechanism(user: str, mechanism: ScramMechanism) -> security_pb2.UserMechanism:
    return security_pb2.UserMechanism(user=user, mechanism=security_pb2.ScramMechanism.ValueType(mechanism))


def _acl(given: AclBinding | AclFilter) -> security_pb2.Acl:
    """Return the wire form of an ACL. Raises InvalidRequestError: a field has the wrong type."""
    wire = security_pb2.Acl
    return wire(
        resource_type=wire.ResourceType.ValueType(_one_of(ResourceType, given.resource_type)),
        resource_name=given.resource_name or "",
        pattern_type=wire.PatternType.ValueType(_one_of(PatternType, given.pattern_type)),
        principal=given.principal or "",
        host=given.host or "",
        operation=wire.Operation.ValueType(_one_of(AclOperation, given.operation)),
        permission=wire.Permission.ValueType(_one_of(AclPermission, given.permission)),
    )


def _parts_of_role(
    add: AclBinding | Iterable[AclBinding],
    remove: AclBinding | Iterable[AclBinding],
    grant: str | Iterable[str],
    revoke: str | Iterable[str],
) -> dict[str, Any]:
    return {
        "additions": [_acl(each) for each in _each_change(add, AclBinding)],
        "removals": [_acl(each) for each in _each_change(remove, AclBinding)],
        "grants": names_of(grant),
        "revocations": names_of(revoke),
    }


def _one_of(kind: type[Choice], given: int | None) -> Choice:
    """Return the wire value of a field; None means ANY."""
    if given is None:
        return kind["ANY"]
    try:
        return kind(given)
    except ValueError:
        known = ", ".join(kind.__members__)
        raise InvalidRequestError(f"{given!r} is no {kind.__name__}: expected one of {known}") from None


def _binding(wire: security_pb2.Acl) -> AclBinding:
    return AclBinding(
        wire.principal,
        AclOperation(wire.operation),
        ResourceType(wire.resource_type),
        wire.resource_name,
        PatternType(wire.pattern_type),
        AclPermission(wire.permission),
        wire.host,
    )


PLACES_AGES: Final = 5
"""Metadata that only tell which broker to ask may be this many times as old as `metadata.max.age.ms`."""
_OTHERS: Final = 2
"""How many brokers are asked to relay the call if the client does not reach the node itself."""
_SLOW_MS: Final = 20.0
"""A slower answer may include opening the connection and says little about the node's clock; it is asked once more."""


class AdminEngine:
    """The engine of `raftlog.Admin` and `raftlog.aio.Admin`, whose docstrings define each call and its errors.

    `timeout`: seconds for the call, None for `default.api.timeout.ms`. `missing`: a list that receives the reasons why
    an answer may be incomplete; without it an incomplete answer is an error.
    """

    def __init__(self, bootstrap: list[str], options: AdminOptions) -> None:
        self._options = options
        self._connections = connections(options.pem, options.sasl)
        self._metadata = MetadataCache(
            self._connections,
            bootstrap,
            max_age_ms=_METADATA_REFRESH_MS,
            request_timeout_ms=options.request_timeout_ms,
            pauses=options.pauses,
        )
        self._metadata.refused_grace_s = REFUSED_GRACE_S
        self._max_age_s = options.metadata_max_age_ms / 1000
        self._coordinators = Coordinators(self._metadata, self._connections, options, counted=self._counted)
        self._transaction_coordinators = Coordinators(
            self._metadata, self._connections, options, TRANSACTIONS, self._counted
        )
        self._offsets = OffsetLookup(self._metadata, self._connections, options)
        self.counters = CallMetrics(time.monotonic())
        self.closed = False
        self._answered = False
        """Whether any broker has answered yet."""
        self._last_address = ""
        """The address of the broker that answered last; it is asked first."""

    def metrics(self) -> Metrics:
        """As `Admin.metrics`; from any thread."""
        now_s = time.monotonic()
        errors = rate_and_total("request-error", self.counters.errors, now_s)
        return {"admin-client-metrics": {**self.counters.show(now_s), **errors}}

    async def close(self) -> None:
        """Close the connections."""
        await self._transaction_coordinators.close()
        await self._coordinators.close()
        self.closed = True
        await self._metadata.close()
        await self._connections.close()

    # How brokers are asked

    def _limit_s(self, timeout: float | None) -> float:
        """Return the seconds that a call with this timeout may take."""
        limit_s = self._options.default_api_timeout_ms / 1000 if timeout is None else timeout
        if timeout is None and not self._metadata.view.brokers and not self._answered:
            limit_s = min(limit_s, _FIRST_CONTACT_S)
        return limit_s

    async def _retried(
        self,
        attempt: Callable[[float], Awaitable[T]],
        timeout: float | None,
        at_once: tuple[type[RaftlogError], ...] = (),
    ) -> T:
        """Return the first successful attempt's result; retriable errors are retried, except those in `at_once`."""
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        loop = asyncio.get_running_loop()
        limit_s = self._limit_s(timeout)
        started = loop.time()
        deadline = started + limit_s
        failures = 0
        last: RaftlogError = RequestTimedOut(f"no answer within {limit_s:g} s" if limit_s else "no answer yet")
        while True:
            try:
                async with asyncio.timeout_at(deadline + _DEADLINE_MARGIN_S):
                    result = await attempt(deadline)
                self._answered = True
                return result
            except TimeoutError:
                raise last from None
            except RetriableError as error:
                if isinstance(error, at_once) or self._is_hopeless(error, loop.time() - started):
                    raise
                last = error
                failures += 1
                self._metadata.expire()
                pause_s = self._options.pauses.after_ms(error, failures) / 1000
                deadline = started + self._limit_s(timeout)  # later once any broker has answered
                final = isinstance(error, UnknownTopicOrPartition) and failures > 3
                if final or loop.time() + pause_s >= deadline:
                    raise
                await asyncio.sleep(pause_s)

    def _is_hopeless(self, error: RaftlogError, waited_s: float) -> bool:
        """Whether no address has a listener now, and no broker has ever answered."""
        known = self._answered or self._metadata.view.brokers
        grace_s = 0.0 if isinstance(error, CertificateRefused) else REFUSED_GRACE_S
        return isinstance(error, NobodyListens) and not known and waited_s >= grace_s

    async def _anyone(
        self,
        method: str,
        request: Any,
        timeout: float | None,
        *,
        done: type[RaftlogError] | None = None,
        at_once: tuple[type[RaftlogError], ...] = (),
        in_turn: bool = False,
        service: Service = admin_stub,
    ) -> Any:
        """Call a method of a service on the first broker that can answer, until the deadline.

        `done`: the error with which a broker says that the change was already made. After an unanswered attempt it
        counts as success, since that attempt may have made the change. `at_once`: errors that are not retried.
        `in_turn`: each broker gets only its share of the time, so that all of them are asked.
        """
        cause: RaftlogError | None = None  # the answer of a reachable broker, which tells more than a timeout
        timed_out = False

        async def attempt(deadline: float) -> Any:
            nonlocal cause, timed_out
            known = [broker.address for broker in self._metadata.view.brokers.values() if not broker.fenced]
            addresses = list(dict.fromkeys([*known, *self._metadata.bootstrap]))
            addresses.sort(key=lambda address: address != self._last_address)  # stable
            reasons = []
            loop = asyncio.get_running_loop()
            for number, address in enumerate(addresses):
                until = loop.time() + (deadline - loop.time()) / (len(addresses) - number) if in_turn else deadline
                try:
                    response = await self._response(address, method, request, until, service)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:
                    reasons.append(str(error))
                    timed_out = timed_out or isinstance(error, RequestTimedOut)
                    continue
                try:
                    self._check(response)
                except (BrokerUnavailable, RequestTimedOut, ShuttingDown) as error:  # another broker may succeed
                    cause = type(error)(f"{address}: {error}")
                    timed_out = timed_out or isinstance(error, RequestTimedOut)
                    continue
                except RaftlogError as error:
                    if not timed_out or done is None or not isinstance(error, done):
                        raise
                self._last_address = address
                return response
            raise cause or await self._connections.unavailable(addresses, reasons)

        return await self._retried(attempt, timeout, at_once)

    async def _response(
        self, address: str, method: str, request: Any, deadline: float, service: Service = admin_stub
    ) -> Any:
        """Return a broker's response; the caller checks the errors in it."""
        left_s = max(_DEADLINE_MARGIN_S, deadline - asyncio.get_running_loop().time())
        stub = service(self._connections.channel(address))
        try:
            with self._counted():
                response = await getattr(stub, method)(
                    request,
                    timeout=min(_ADDRESS_TIMEOUT_S, self._options.request_timeout_ms / 1000, left_s),
                    metadata=(*call_metadata(), *client_id_metadata(self._options.client_id)),
                )
            self._answered = True
            return response
        except grpc.RpcError as error:
            raise from_grpc(error, address) from None

    def _check(self, response: Any) -> None:
        if response.HasField("error") and response.error.code:
            raise from_wire(response.error)
        changed_at = getattr(response, "metadata_offset", 0)
        self._metadata.min_offset = max(self._metadata.min_offset, changed_at)

    async def _call(self, address: str, method: str, request: Any, deadline: float) -> Any:
        response = await self._response(address, method, request, deadline)
        self._check(response)
        return response

    async def _on_broker(self, method: str, request: Any, broker: int | str | None, timeout: float | None) -> Any:
        """Call a broker about its own settings."""
        if not isinstance(broker, int):
            return await self._anyone(method, request, timeout)
        return await self._retried(lambda deadline: self._ask_broker(broker, method, request, deadline), timeout)

    async def _ask_broker(self, broker: int, method: str, request: Any, deadline: float) -> Any:
        await self._find_brokers(broker)
        found = self._metadata.view.brokers.get(broker)
        if found is None:
            known = ", ".join(str(broker_id) for broker_id in sorted(self._metadata.view.brokers))
            raise InvalidRequestError(f"there is no broker {broker}; the cluster has {known}")
        return await self._call(found.address, method, request, deadline)

    async def _ask_all(
        self, topic: str, method: str, request: Any, deadline: float, service: Service
    ) -> tuple[int, list[tuple[BrokerView, Any]], list[RaftlogError]]:
        """Ask each broker for the lists of its coordinators of an internal topic.

        Returns the number of brokers asked, their answers, and the reasons why entries may be missing: brokers that do
        not answer, coordinators that are still loading, partitions without a leader.
        """
        self._metadata.wanted.add(topic)
        await self._find_brokers(topics=(topic,))
        brokers = [each for each in self._metadata.view.brokers.values() if not each.fenced]
        answers = await asyncio.gather(
            *(self._response(broker.address, method, request, deadline, service) for broker in brokers),
            return_exceptions=True,
        )
        found: list[tuple[BrokerView, Any]] = []
        reasons: list[RaftlogError] = []
        for broker, answer in zip(brokers, answers, strict=True):
            if isinstance(answer, BaseException) and not isinstance(answer, RaftlogError):
                raise answer
            error = answer if isinstance(answer, RaftlogError) else None
            if error is None and answer.error.code:
                error = from_wire(answer.error)
            if error is not None:
                reasons.append(type(error)(f"broker {broker.broker_id}: {error}"))
                self._metadata.expire()
            else:
                reasons += [from_wire(loading) for loading in answer.loading]
                found.append((broker, answer))
        view = self._metadata.view.topics.get(topic)
        alone = [part.partition for part in view.partitions if part.leader < 0] if view is not None else []
        if alone:
            named = ", ".join(map(str, alone[:5])) + (", ..." if len(alone) > 5 else "")
            reasons.append(CoordinatorNotAvailable(f"{topic} has partitions without a leader: {named}"))
        return len(brokers), found, reasons

    async def _find_brokers(self, broker: int | None = None, *, topics: Collection[str] = ()) -> None:
        """Learn where brokers are and what they lead of these topics, unless what is known is young enough to try: an
        error corrects it. `broker`: must be known."""
        known = broker is None or broker in self._metadata.view.brokers
        await self._metadata.refresh(topics, max_age_s=self._max_age_s * PLACES_AGES if known else 0.0)

    def _counted(self) -> AbstractContextManager[None]:
        """Return the context manager that counts a request to a broker, for any service."""
        return self.counters.counted(time.monotonic)

    # Topics

    async def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, Any],
        replica_assignment: Sequence[Sequence[int]] | None,
        validate_only: bool,
        timeout: float | None,
    ) -> TopicDescription | None:
        """Create a topic and wait until brokers know it."""
        request = admin_pb2.CreateTopicRequest(
            name=name,
            partitions=0 if replica_assignment else partitions,
            replication_factor=0 if replica_assignment else replication_factor,
            assignments=[records_pb2.ReplicaAssignment(replicas=each) for each in replica_assignment or ()],
            configs={key: as_config(value) for key, value in configs.items()},
            validate_only=validate_only,
            topic_id=b"" if validate_only else uuid.uuid4().bytes,
        )
        await self._anyone("CreateTopic", request, timeout)
        return None if validate_only else await self.describe_topic(name, False, timeout)

    async def delete_topic(self, name: str, timeout: float | None) -> None:
        """Delete a topic."""
        request = admin_pb2.DeleteTopicRequest(name=name)
        await self._anyone("DeleteTopic", request, timeout, done=UnknownTopicOrPartition)

    async def create_partitions(self, topic: str, total: int, timeout: float | None) -> None:
        """Raise the number of partitions."""
        request = admin_pb2.CreatePartitionsRequest(topic=topic, partitions=total)
        await self._anyone("CreatePartitions", request, timeout, done=InvalidPartitions)

    async def list_topics(self, internal: bool, timeout: float | None) -> list[str]:
        """Return the names of all topics."""

        async def attempt(deadline: float) -> list[str]:
            return [view.name for view in await self._all_topics(internal, self._max_age_s)]

        return await self._retried(attempt, timeout)

    async def _all_topics(self, internal: bool, max_age_s: float) -> list[TopicView]:
        await self._metadata.refresh(all_topics=True, max_age_s=max_age_s)
        known = self._metadata.view.topics.values()
        return sorted((view for view in known if internal or not view.internal), key=lambda view: view.name)

    async def describe_topic(
        self, name: str, include_authorized_operations: bool, timeout: float | None
    ) -> TopicDescription:
        """Return the description of a topic."""
        if self.closed:
            raise ClosedError("the admin client is closed, or was made in another process")
        view = await self._metadata.topic(name, self._limit_s(timeout) * 1000, fresh=True, max_age_s=self._max_age_s)
        self._answered = True
        if not include_authorized_operations:
            return describe(view)
        return (await self._with_operations([describe(view)], [name], timeout))[0]

    async def describe_topics(
        self,
        names: Iterable[str] | None,
        internal: bool,
        include_authorized_operations: bool,
        timeout: float | None,
    ) -> list[TopicDescription]:
        """Return the descriptions of all topics, or of the named ones in their order."""
        wanted = None if names is None else names_of(names)
        found = [describe(view) for view in await self._topics(wanted, internal, timeout)]
        return await self._with_operations(found, wanted, timeout) if include_authorized_operations else found

    async def _with_operations(
        self, topics: list[TopicDescription], names: list[str] | None, timeout: float | None
    ) -> list[TopicDescription]:
        """Add what this client may do with each topic. `names` None: all topics."""
        request = metadata_pb2.MetadataRequest(
            topics=names or (),
            all_topics=names is None,
            include_internal=names is None,
            min_metadata_offset=self._metadata.min_offset,
            include_authorized_operations=True,
        )
        response: metadata_pb2.MetadataResponse = await self._anyone(
            "Get", request, timeout, service=metadata_pb2_grpc.MetadataStub
        )
        found = {info.name: operations_of(info) for info in response.topics}
        return [each._replace(authorized_operations=found.get(each.name)) for each in topics]

    async def _topics(
        self, names: Iterable[str] | None, internal: bool, timeout: float | None, *, places: bool = False
    ) -> list[TopicView]:
        """Return these topics, or all. `places`: only to find their leaders, as `_find_brokers`."""
        wanted = None if names is None else names_of(names)
        max_age_s = self._max_age_s * (PLACES_AGES if places else 1)

        async def attempt(deadline: float) -> list[TopicView]:
            if wanted is None:
                return await self._all_topics(internal, max_age_s)
            self._metadata.wanted.update(wanted)
            await self._metadata.refresh(wanted, max_age_s=max_age_s)
            view = self._metadata.view
            for name in wanted:
                if name not in view.topics:
                    self._metadata.wanted.discard(name)
                    raise view.missing.get(name) or UnknownTopicOrPartition(f"there is no topic {name!r}")
            return [view.topics[name] for name in wanted]

        return await self._retried(attempt, timeout)

    async def _topic_ids(
        self, parts: Iterable[TopicPartition], timeout: float | None, *, places: bool = False
    ) -> dict[str, bytes]:
        """Return the topics' ids. `places`: as `_topics`.

        Raises:
            UnknownTopicOrPartition: one of the partitions does not exist.
        """
        found = await self._topics(sorted({topic for topic, _ in parts}), True, timeout, places=places)
        views = {view.name: view for view in found}
        for topic, partition in parts:
            if not 0 <= partition < len(views[topic].partitions):
                count = len(views[topic].partitions)
                raise UnknownTopicOrPartition(f"topic {topic} has no partition {partition}; it has {count}, from 0")
        return {name: view.topic_id for name, view in views.items()}

    # The cluster and its nodes

    async def describe_cluster(
        self, linearizable: bool, include_authorized_operations: bool, timeout: float | None
    ) -> ClusterDescription:
        """Return the brokers and controllers of the cluster."""
        request = admin_pb2.DescribeClusterRequest(
            linearizable=linearizable,
            min_metadata_offset=self._metadata.min_offset,
            include_authorized_operations=include_authorized_operations,
        )
        return describe_cluster(await self._anyone("DescribeCluster", request, timeout, in_turn=True))

    async def describe_quorum(self, timeout: float | None) -> QuorumDescription:
        """Return the metadata quorum as its leader sees it."""
        response: admin_pb2.AdminDescribeQuorumResponse = await self._anyone(
            "DescribeQuorum", admin_pb2.AdminDescribeQuorumRequest(), timeout
        )
        return describe_quorum(response.quorum)

    async def elect_leaders(self, topic: str, partitions: Iterable[int], unclean: bool, timeout: float | None) -> None:
        """Elect the first replica of each partition, or with `unclean` one that may miss records."""
        request = admin_pb2.ElectLeadersRequest(topic=topic, partitions=list(partitions), unclean=unclean)
        refusals = (PreferredLeaderNotAvailable, EligibleLeadersNotAvailable)
        await self._anyone("ElectLeaders", request, timeout, at_once=refusals)

    async def unregister_broker(self, broker_id: int, timeout: float | None) -> None:
        """Remove a broker from the metadata."""
        request = admin_pb2.AdminUnregisterBrokerRequest(broker_id=broker_id)
        await self._anyone("UnregisterBroker", request, timeout)

    async def alter_broker(
        self,
        broker_id: int,
        cordoned: bool | None,
        drained: bool | None,
        until_restart: bool,
        timeout: float | None,
    ) -> None:
        """Cordon, uncordon, drain or undrain a broker."""
        request = admin_pb2.AdminAlterBrokerRequest(
            broker_id=broker_id, cordoned=cordoned, drained=drained, until_restart=until_restart
        )
        await self._anyone("AlterBroker", request, timeout)

    async def update_feature(self, name: str, level: int, validate_only: bool, timeout: float | None) -> None:
        """Raise the level of a feature."""
        request = admin_pb2.AdminUpdateFeatureRequest(name=name, level=level, validate_only=validate_only)
        await self._anyone("UpdateFeature", request, timeout)

    async def describe_node(self, node_id: int, timeout: float | None) -> NodeDescription:
        """Return a node's description of itself; another broker asks for it if the node is not a reachable broker."""

        async def attempt(deadline: float) -> NodeDescription:
            await self._find_brokers(node_id)
            brokers = self._metadata.view.brokers
            own = [brokers[node_id].address] if node_id in brokers else []
            others = [each.address for each in brokers.values() if not each.fenced and each.address not in own]
            others.sort(key=lambda address: address != self._last_address)  # stable
            addresses = [*own, *others[:_OTHERS]] or self._metadata.bootstrap
            first: RaftlogError | None = None
            loop = asyncio.get_running_loop()
            for number, address in enumerate(addresses):
                until = loop.time() + (deadline - loop.time()) / (len(addresses) - number)
                try:
                    found = await self._described(node_id, address, until)
                    if found.clock_uncertainty_ms > _SLOW_MS / 2:
                        again = await self._described(node_id, address, until)
                        found = min(found, again, key=lambda each: each.clock_uncertainty_ms)
                except (RetriableError, UnsupportedVersion) as error:
                    first = first or error
                else:
                    return found
            raise first or BrokerUnavailable(f"no broker is reachable that could relay the call to node {node_id}")

        return await self._retried(attempt, timeout)

    async def _described(self, node_id: int, address: str, until: float) -> NodeDescription:
        request = node_pb2.DescribeNodeRequest(node_id=node_id)
        asked_ms, begun_s = time.time() * 1000, time.monotonic()
        response = await self._response(address, "DescribeNode", request, until, node_pb2_grpc.NodeStub)
        round_trip_ms = (time.monotonic() - begun_s) * 1000
        if response.error.code:
            raise from_wire(response.error)
        return describe_node(response.node, asked_ms, round_trip_ms, address)

    # Configs

    async def describe_configs(
        self, topic: str | None, broker: int | str | None, broker_logger: int | None, timeout: float | None
    ) -> dict[str, ConfigDescription]:
        """Return the config of a topic, of a broker, or of a broker's loggers, by key."""
        request = admin_pb2.DescribeConfigsRequest(
            resource=resource_of(topic, broker, broker_logger), min_metadata_offset=self._metadata.min_offset
        )
        asked = broker if broker_logger is None else broker_logger
        response: admin_pb2.DescribeConfigsResponse = await self._on_broker("DescribeConfigs", request, asked, timeout)
        return _described_configs(response.entries)

    async def describe_topic_configs(
        self, topics: Iterable[str], missing: dict[str, RaftlogError] | None, timeout: float | None
    ) -> dict[str, Mapping[str, ConfigDescription]]:
        """Return the configs of many topics, with one request to one broker for some thousand of them.

        `missing` receives the errors of topics. Without it, the first is raised.
        """
        wanted = list(dict.fromkeys(names_of(topics)))
        errors: dict[str, RaftlogError] = {}
        found: dict[str, Mapping[str, ConfigDescription]] = {}
        for at in range(0, len(wanted), _NAMES_AT_A_TIME):
            piece = wanted[at : at + _NAMES_AT_A_TIME]
            request = admin_pb2.DescribeTopicConfigsRequest(topics=piece, min_metadata_offset=self._metadata.min_offset)
            try:
                response: admin_pb2.DescribeTopicConfigsResponse = await self._anyone(
                    "DescribeTopicConfigs", request, timeout
                )
            except UnsupportedVersion:  # a broker of an older version
                found |= await self._configs_of_each(piece, errors, timeout)
                continue
            for same in response.configs:
                if same.error.code:
                    errors |= dict.fromkeys(same.topics, from_wire(same.error))
                else:
                    found |= dict.fromkeys(same.topics, MappingProxyType(_described_configs(same.entries)))
        if missing is not None:
            missing.update(errors)
        elif errors:
            raise next(iter(errors.values()))
        return {name: found[name] for name in wanted if name in found}

    async def _configs_of_each(
        self, topics: Iterable[str], errors: dict[str, RaftlogError], timeout: float | None
    ) -> dict[str, Mapping[str, ConfigDescription]]:
        found: dict[str, Mapping[str, ConfigDescription]] = {}
        for name in topics:
            try:
                found[name] = await self.describe_configs(name, None, None, timeout)
            except RaftlogError as error:
                errors[name] = error
        return found

    async def alter_configs(
        self,
        topic: str | None,
        broker: int | str | None,
        broker_logger: int | None,
        set_: Mapping[str, Any],
        unset: Iterable[str],
        validate_only: bool,
        timeout: float | None,
    ) -> None:
        """Change config keys of a topic or a broker, or levels of a broker's loggers, by asking that broker."""
        request = admin_pb2.AlterConfigsRequest(
            resource=resource_of(topic, broker, broker_logger),
            set={key: as_config(value) for key, value in set_.items()},
            unset=names_of(unset),
            validate_only=validate_only,
        )
        await self._on_broker("AlterConfigs", request, broker_logger, timeout)

    # Logs

    async def describe_log_dirs(self, broker: int | None, timeout: float | None) -> list[LogDirDescription]:
        """Return the log directories of one broker, or of all."""

        async def attempt(deadline: float) -> list[LogDirDescription]:
            await self._find_brokers(broker)
            wanted = [found for found in self._metadata.view.brokers.values() if broker in (None, found.broker_id)]
            if not wanted:
                await self._ask_broker(broker or 0, "", None, deadline)  # raises
            answers = await asyncio.gather(*(self._log_dirs(found, deadline) for found in sorted(wanted)))
            return [log_dir for answer in answers for log_dir in answer]

        return await self._retried(attempt, timeout)

    async def _log_dirs(self, broker: BrokerView, deadline: float) -> list[LogDirDescription]:
        response: admin_pb2.DescribeLogDirsResponse = await self._call(
            broker.address, "DescribeLogDirs", admin_pb2.DescribeLogDirsRequest(), deadline
        )
        return [
            LogDirDescription(
                broker.broker_id,
                info.path,
                from_wire(info.error) if info.HasField("error") and info.error.code else None,
                info.total_bytes,
                info.usable_bytes,
                [
                    LogDirPartition(
                        part.topic,
                        part.partition,
                        part.size_bytes,
                        part.log_start_offset,
                        part.log_end_offset,
                        part.high_watermark,
                        part.segments,
                    )
                    for part in info.partitions
                ],
            )
            for info in response.log_dirs
        ]

    async def delete_records(
        self, before: Mapping[TopicPartition, int], timeout: float | None
    ) -> dict[TopicPartition, int]:
        """Delete the records below the offsets (-1: all committed ones); return the new log start offsets."""
        done: dict[TopicPartition, int] = {}

        async def attempt(deadline: float) -> dict[TopicPartition, int]:
            for part, offset in before.items():
                if TopicPartition(*part) not in done:
                    done[TopicPartition(*part)] = await self._delete_before(TopicPartition(*part), offset)
            return done

        return await self._retried(attempt, timeout)

    async def _delete_before(self, part: TopicPartition, offset: int) -> int:
        topic = await self._metadata.topic(part.topic, self._options.default_api_timeout_ms, fresh=True)
        if not 0 <= part.partition < len(topic.partitions):
            raise UnknownTopicOrPartition(f"{part} does not exist: the topic has {len(topic.partitions)} partitions")
        leader = self._metadata.leader(part)
        if leader is None:
            raise LeaderNotAvailable(f"{part} has no leader at the moment")
        request = log_pb2.DeleteRecordsRequest()
        request.partitions.add(topic_id=topic.topic_id, partition=part.partition, before_offset=offset)
        stub = log_pb2_grpc.LogStub(self._connections.channel(leader.address))
        try:
            with self._counted():
                response = await stub.DeleteRecords(
                    request, timeout=self._options.request_timeout_ms / 1000, metadata=call_metadata()
                )
        except grpc.RpcError as error:
            raise from_grpc(error, leader.address) from None
        result = response.results[0]
        if result.HasField("error") and result.error.code:
            refusal = from_wire(result.error)
            if isinstance(refusal, FencedError):
                raise LeaderNotAvailable(str(refusal))
            raise refusal
        return int(result.log_start_offset)

    async def list_offsets(
        self,
        wanted: Mapping[TopicPartition, int | str],
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> dict[TopicPartition, OffsetAndTimestamp | None]:
        """Return offsets by time or by name."""
        asked = {TopicPartition(*part): _which(which) for part, which in wanted.items()}

        async def attempt(deadline: float) -> dict[TopicPartition, OffsetAndTimestamp | None]:
            await self._topic_ids(asked, timeout, places=True)
            if missing is not None:
                answers = await self._look_up(asked)
                missing[:] = [each for each in answers.values() if isinstance(each, RaftlogError)]
            else:
                answers = await self._offsets.find_some(asked, common_pb2.READ_UNCOMMITTED, self._limit_s(timeout))
            found: dict[TopicPartition, OffsetAndTimestamp | None] = {}
            for part in asked:
                answer = answers[part]
                if not isinstance(answer, RaftlogError):
                    found[part] = answer
                elif missing is None:
                    raise answer
            return found

        return await self._retried(attempt, timeout)

    async def _look_up(self, wanted: Mapping[TopicPartition, int]) -> Mapping[TopicPartition, Answer]:
        if not wanted:
            return {}
        try:
            return await self._offsets.find_some(
                wanted, common_pb2.READ_UNCOMMITTED, patience_s=_LOOK_UP_PATIENCE_S, raises=False
            )
        except RaftlogError as error:
            return dict.fromkeys(wanted, error)

    # Replicas and their moves (KIP-455)

    async def describe_replicas(
        self, topics: Iterable[str] | None, silent: dict[int, RaftlogError] | None, timeout: float | None
    ) -> dict[TopicPartition, PartitionReplicas]:
        """Return the leaders' view of their replicas, without the partitions of leaders that do not answer.

        `silent` receives the reasons, by broker. Without it, it is an error if no leader answers.
        """
        wanted = None if topics is None else names_of(topics)

        async def attempt(deadline: float) -> dict[TopicPartition, PartitionReplicas]:
            views = await self._topics(wanted, True, timeout, places=True)
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
                    self._metadata.expire()
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

    async def alter_reassignments(
        self, wanted: Mapping[TopicPartition, Sequence[int] | None], timeout: float | None
    ) -> None:
        """Begin, change or cancel moves; if some were refused, raises after all were tried."""
        moves = [(TopicPartition(*part), replicas) for part, replicas in wanted.items()]
        refused: list[RaftlogError] = []
        for start in range(0, len(moves), MAX_REASSIGNMENTS_PER_REQUEST):
            request = admin_pb2.AdminAlterReassignmentsRequest()
            for part, replicas in moves[start : start + MAX_REASSIGNMENTS_PER_REQUEST]:
                if replicas is not None and not replicas:
                    raise ValueError(f"{part} needs at least one replica; None cancels the move in progress")
                request.reassignments.add(topic=part.topic, partition=part.partition, replicas=replicas or ())
            response: admin_pb2.AdminAlterReassignmentsResponse = await self._anyone(
                "AlterReassignments", request, timeout
            )
            refused += [from_wire(each.error) for each in response.results if each.error.code]
        _raise_first(refused, len(moves))

    async def list_reassignments(self, timeout: float | None) -> dict[TopicPartition, Reassignment]:
        """Return the moves in progress."""
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

    # Groups

    async def list_groups(
        self, states: Iterable[str] | None, missing: list[RaftlogError] | None, timeout: float | None
    ) -> list[GroupListing]:
        """Return all groups, by id; `missing` receives the reasons why some may be missing."""
        wanted = [_state(name) for name in names_of(states or ())]

        async def attempt(deadline: float) -> list[GroupListing]:
            request = group_pb2.ListGroupsRequest(states=wanted)
            asked, answers, reasons = await self._ask_all(
                OFFSETS_TOPIC, "ListGroups", request, deadline, group_pb2_grpc.GroupStub
            )
            found: dict[str, GroupListing] = {}
            for broker, answer in answers:
                for group in answer.groups:
                    self._coordinators.learn(group.group_id, Coordinator(broker.broker_id, broker.address, -1))
                    found[group.group_id] = GroupListing(
                        group.group_id, state_name(group.state), group.members, broker.broker_id, type_name(group.type)
                    )
            if reasons and (missing is None or (not found and len(reasons) >= asked)):
                raise reasons[0]
            if missing is not None:
                missing[:] = reasons
            return [found[group_id] for group_id in sorted(found)]

        return await self._retried(attempt, timeout)

    async def describe_groups(
        self, group_ids: Iterable[str], include_authorized_operations: bool, timeout: float | None
    ) -> dict[str, GroupDescription]:
        """Return the descriptions of groups, with one request to each coordinator."""
        asked = {"include_authorized_operations": include_authorized_operations}
        found = await self._described_groups(_checked(group_ids), asked, None, timeout)
        return {group_id: describe_group(answer) for group_id, answer in found.items()}

    async def _described_groups(
        self,
        wanted: Sequence[str],
        asked: Mapping[str, bool],
        missing: dict[str, RaftlogError] | None,
        timeout: float | None,
    ) -> dict[str, group_pb2.GroupDescription]:
        """Return what coordinators tell of groups. `asked`: fields of the request.

        `missing` receives the errors of groups. Without it, the first is raised.
        """
        found: dict[str, group_pb2.GroupDescription] = {}
        errors: dict[str, RaftlogError] = {}

        async def attempt(deadline: float) -> None:
            left = [group_id for group_id in wanted if group_id not in found]
            for group_id, answer in (await self._of_groups("DescribeGroups", left, deadline, **asked)).items():
                if isinstance(answer, RaftlogError):
                    errors[group_id] = answer
                elif answer.state == group_pb2.DEAD:
                    errors[group_id] = GroupIdNotFound(f"there is no group {group_id!r}")
                else:
                    found[group_id] = answer
                    errors.pop(group_id, None)
            failed = next((each for each in errors.values() if missing is None or each.retriable), None)
            if failed is not None:
                raise failed

        try:
            await self._retried(attempt, timeout)
        except RetriableError:
            if missing is None or not errors:
                raise
        if missing is not None:
            missing.update(errors)
        return {group_id: found[group_id] for group_id in wanted if group_id in found}

    async def delete_groups(self, group_ids: Iterable[str], timeout: float | None) -> None:
        """Delete groups and their offsets; if some were refused, raises after all were tried."""
        wanted = _checked(group_ids)
        done: dict[str, RaftlogError | None] = {}
        in_doubt: set[str] = set()

        async def attempt(deadline: float) -> None:
            left = [group_id for group_id in wanted if group_id not in done]
            failed: RaftlogError | None = None
            for group_id, answer in (await self._of_groups("DeleteGroups", left, deadline)).items():
                if not isinstance(answer, RaftlogError):
                    done[group_id] = None
                elif isinstance(answer, GroupIdNotFound) and group_id in in_doubt:
                    done[group_id] = None  # an earlier attempt has done it, and its response was lost
                elif answer.retriable:
                    failed = answer
                    in_doubt.add(group_id)
                else:
                    done[group_id] = answer
            if failed is not None:
                raise failed

        await self._retried(attempt, timeout)
        _raise_first([error for error in done.values() if error is not None], len(wanted))

    async def _of_groups(self, method: str, group_ids: Sequence[str], deadline: float, **more: bool) -> dict[str, Any]:
        """Call a method that takes many groups; return each group's answer or error. `more`: fields of the request."""
        found: dict[str, Any] = {}
        by_coordinator: dict[Coordinator, list[str]] = {}
        for group_id in group_ids:
            try:
                known = await self._coordinators.find_once(group_id)
            except RaftlogError as error:
                found[group_id] = error
            else:
                by_coordinator.setdefault(known._replace(partition=-1), []).append(group_id)
        request = getattr(group_pb2, f"{method}Request")
        answers = await asyncio.gather(
            *(
                self._response(
                    coordinator.address, method, request(group_ids=part, **more), deadline, group_pb2_grpc.GroupStub
                )
                for coordinator, part in by_coordinator.items()
            ),
            return_exceptions=True,
        )
        for part, answer in zip(by_coordinator.values(), answers, strict=True):
            if isinstance(answer, RaftlogError):
                found |= dict.fromkeys(part, answer)
                for group_id in part:
                    self._coordinators.forget(group_id)
                continue
            if isinstance(answer, BaseException):
                raise answer
            results = answer.groups if method == "DescribeGroups" else answer.results
            for group_id, result in zip(part, results, strict=True):
                found[group_id] = from_wire(result.error) if result.error.code else result
                if isinstance(found[group_id], (NotCoordinator, CoordinatorNotAvailable)):
                    self._coordinators.forget(group_id)
        return found

    async def _of_group(self, method: str, group_id: str, request: Any, timeout: float | None) -> Any:
        """Call a method for one group; retriable errors in the response's `results` are retried too."""

        async def attempt(deadline: float) -> Any:
            left_s = max(0.1, deadline - asyncio.get_running_loop().time())
            limit_s = min(left_s, self._options.request_timeout_ms / 1000)
            response = await self._coordinators.call(group_id, method, request, limit_s)
            for result in getattr(response, "results", ()):
                error = from_wire(result.error) if result.error.code else None
                if error is not None and error.retriable:
                    if isinstance(error, (NotCoordinator, CoordinatorNotAvailable)):
                        self._coordinators.forget(group_id)
                    raise error
            return response

        return await self._retried(attempt, timeout)

    async def group_offsets(self, group_id: str, timeout: float | None) -> dict[TopicPartition, OffsetAndMetadata]:
        """Return all offsets that a group has committed, in order; none for an unknown group."""
        return {
            part: OffsetAndMetadata(found.offset, found.metadata, found.leader_epoch)
            for part, found in (await self._committed(group_id, timeout)).items()
        }

    async def _committed(self, group_id: str, timeout: float | None) -> _Committed:
        request = group_pb2.FetchOffsetsRequest(group_id=_checked([group_id])[0], member_epoch=-1, all=True)
        try:
            response: group_pb2.FetchOffsetsResponse = await self._of_group("FetchOffsets", group_id, request, timeout)
        except GroupIdNotFound:
            return {}
        return _in_order(response.offsets)

    async def alter_group_offsets(
        self, group_id: str, offsets: Mapping[TopicPartition, int | OffsetAndMetadata], timeout: float | None
    ) -> None:
        """Commit offsets for a group that has no members; raises if some were refused."""
        _checked([group_id])
        wanted = checked(offsets)
        ids = await self._topic_ids(wanted, timeout)
        refused: list[RaftlogError] = []
        for piece in in_pieces(to_commit((part, Entry(offset, ids[part.topic])) for part, offset in wanted.items())):
            request = group_pb2.CommitOffsetsRequest(
                group_id=group_id,
                member_epoch=-1,
                offsets=piece,
                timeout_ms=int(min(self._options.request_timeout_ms, self._limit_s(timeout) * 1000)),
            )
            try:
                response: group_pb2.CommitOffsetsResponse = await self._of_group(
                    "CommitOffsets", group_id, request, timeout
                )
            except UnknownMemberId as error:
                raise _not_empty(group_id) from error
            refused += [from_wire(each.error) for each in response.results if each.error.code]
            if refused and isinstance(refused[0], UnknownMemberId):
                raise _not_empty(group_id)
        _raise_first(refused, len(wanted))

    async def delete_group_offsets(
        self, group_id: str, partitions: Iterable[TopicPartition] | TopicPartition, timeout: float | None
    ) -> None:
        """Delete committed offsets; raises if some were refused."""
        by_topic: dict[str, list[int]] = {}
        if isinstance(partitions, TopicPartition):  # a single partition is a tuple too
            partitions = [partitions]
        for topic, partition in sorted(set(partitions)):
            by_topic.setdefault(topic, []).append(partition)
        request = group_pb2.DeleteOffsetsRequest(group_id=_checked([group_id])[0])
        for topic, numbers in by_topic.items():
            request.partitions.add(topic=topic, partitions=numbers)
        response: group_pb2.DeleteOffsetsResponse = await self._of_group("DeleteOffsets", group_id, request, timeout)
        refused = [from_wire(each.error) for each in response.results if each.error.code]
        _raise_first(refused, len(response.results))

    async def group_lag(self, group_id: str, timeout: float | None) -> dict[TopicPartition, PartitionLag]:
        """Return a group's position and lag in all partitions that it reads or has committed an offset for."""
        return (await self.group_lags([group_id], None, timeout))[group_id]

    async def group_lags(
        self, group_ids: Iterable[str], missing: dict[str, RaftlogError] | None, timeout: float | None
    ) -> dict[str, dict[TopicPartition, PartitionLag]]:
        """Return the lag of many groups, with one request to each coordinator and a few to each leader.

        `missing` receives the errors of groups. Without it, the first is raised.
        """
        wanted = list(dict.fromkeys(_checked(group_ids)))
        errors: dict[str, RaftlogError] = {}
        loop = asyncio.get_running_loop()
        started = loop.time()
        described = await self._described_groups(
            wanted, {"include_committed": True}, None if missing is None else errors, timeout
        )
        offsets = {
            group_id: _in_order(group.committed.offsets)
            for group_id, group in described.items()
            if group.HasField("committed")
        }
        # The other groups: their broker runs an older version, or they did not fit into its response.
        deadline = max(started + self._limit_s(timeout), loop.time() + min(self._limit_s(timeout), _PATIENCE_S))
        slots = asyncio.Semaphore(_GROUPS_AT_A_TIME)

        async def fetch(group_id: str) -> None:
            async with slots:
                if missing is None and errors:
                    return  # the call fails with the first error
                try:
                    if (left_s := deadline - loop.time()) <= 0:
                        raise RequestTimedOut(f"no time was left to ask for the offsets of the group {group_id!r}")
                    offsets[group_id] = await self._committed(group_id, left_s)
                except RaftlogError as error:
                    errors[group_id] = error

        await asyncio.gather(*(fetch(group_id) for group_id in described if group_id not in offsets))
        if missing is None and errors:
            raise next(iter(errors.values()))
        groups: dict[str, tuple[_Committed, dict[TopicPartition, str]]] = {}
        for group_id, group in described.items():
            if group_id in offsets:
                members = describe_group(group).members
                readers = {part: each.member_id for each in members for part in each.assigned}
                groups[group_id] = offsets[group_id], readers
        places = await self._places(
            {
                (group_id, part): committed[part].offset if part in committed else None
                for group_id, (committed, readers) in groups.items()
                for part in sorted({*committed, *readers})
            }
        )
        lags: dict[str, dict[TopicPartition, PartitionLag]] = {group_id: {} for group_id in groups}
        for (group_id, part), place in places.items():
            committed, readers = groups[group_id]
            lags[group_id][part] = _lag(committed.get(part), place, readers.get(part, ""), time.time() * 1000)
        if missing is not None:
            missing.update(errors)
        return lags

    async def _places(
        self, offsets: Mapping[tuple[str, TopicPartition], int | None]
    ) -> dict[tuple[str, TopicPartition], _Place]:
        """Return the start and end of partitions, and the age of the records at the offsets of groups."""
        named = dict.fromkeys(part for _, part in offsets)
        topics = {topic for topic, _ in named}
        self._metadata.wanted |= topics
        with contextlib.suppress(RetriableError):  # the cached metadata serves
            await self._find_brokers(topics=topics)
        there = [part for part in named if self._metadata.view.partition(part) is not None]
        starts, ends = await asyncio.gather(
            self._look_up(dict.fromkeys(there, EARLIEST)), self._look_up(dict.fromkeys(there, LATEST))
        )
        unread: dict[TopicPartition, set[int]] = {}
        for (_, part), offset in offsets.items():
            if (first := _first_unread(offset, starts.get(part), ends.get(part))) is not None:
                unread.setdefault(part, set()).add(first)
        # A request asks for one offset of each partition, so several groups at one partition need several requests.
        rounds = [
            {part: AtOffset(first) for part, first in zip(unread, some, strict=True) if first is not None}
            for some in zip_longest(*map(sorted, unread.values()))
        ]
        ages: dict[tuple[TopicPartition, int], Answer] = {}
        for asked, answers in zip(rounds, await asyncio.gather(*map(self._look_up, rounds)), strict=True):
            ages |= {(part, asked[part]): answer for part, answer in answers.items()}
        places = {}
        for (group_id, part), offset in offsets.items():
            if part not in starts:
                gone = UnknownTopicOrPartition(f"{part} does not exist")
                places[group_id, part] = _Place(gone, gone, None)
            else:
                first = _first_unread(offset, starts[part], ends[part])
                age = None if first is None else ages.get((part, first))
                places[group_id, part] = _Place(starts[part], ends[part], age)
        return places

    # Transactions and staged batches, as their coordinators know them

    async def list_transactions(
        self,
        states: Iterable[str] | None,
        producer_ids: Iterable[int] | None,
        running_longer_than_ms: int,
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> list[TransactionListing]:
        """Return transactional ids by id, then open stages by sink; `missing` receives why some may be missing."""
        wanted = [_transaction_state(name) for name in names_of(states or ())]
        pieces: list[list[int]] = [[]]
        if producer_ids is not None:
            named = sorted(set(producer_ids))
            pieces = [named[at : at + _NAMES_AT_A_TIME] for at in range(0, len(named), _NAMES_AT_A_TIME)]
        found = {}
        reasons: list[RaftlogError] = []
        for piece in pieces:
            request = transaction_pb2.ListTransactionsRequest(
                states=wanted, producer_ids=piece, running_longer_than_ms=running_longer_than_ms
            )
            untold: list[RaftlogError] | None = None if missing is None else []
            for broker, answer in await self._list_all(request, untold, timeout):
                for each in answer.transactions:
                    key = (not each.transactional_id, each.transactional_id, each.sink_id, each.producer_id)
                    found[key] = TransactionListing(
                        each.transactional_id,
                        each.sink_id,
                        each.producer_id,
                        transaction_state_name(each.state),
                        each.started_ms,
                        broker,
                    )
            reasons += [each for each in untold or () if str(each) not in map(str, reasons)]
        if missing is not None:
            missing[:] = reasons
        return [found[key] for key in sorted(found)]

    async def list_sinks(self, missing: list[RaftlogError] | None, timeout: float | None) -> list[SinkListing]:
        """Return the sinks by id; `missing` receives the reasons why some may be missing."""
        request = transaction_pb2.ListTransactionsRequest()
        found = {
            each.sink_id: SinkListing(
                each.sink_id, each.target, each.last_batch_id, each.updated_ms, each.open_stages, broker
            )
            for broker, answer in await self._list_all(request, missing, timeout)
            for each in answer.sinks
        }
        return [found[sink_id] for sink_id in sorted(found)]

    async def _list_all(
        self,
        request: transaction_pb2.ListTransactionsRequest,
        missing: list[RaftlogError] | None,
        timeout: float | None,
    ) -> list[tuple[int, transaction_pb2.ListTransactionsResponse]]:
        """Return each broker's list, by broker id."""

        async def attempt(deadline: float) -> list[tuple[int, transaction_pb2.ListTransactionsResponse]]:
            _, answers, reasons = await self._ask_all(
                STATE_TOPIC, "ListTransactions", request, deadline, TRANSACTIONS.stub
            )
            if reasons and (missing is None or not answers):
                raise reasons[0]
            if missing is not None:
                missing[:] = reasons
            return [(broker.broker_id, answer) for broker, answer in answers]

        return await self._retried(attempt, timeout)

    async def ask_transactions(self, address: str, method: str, request: Any, deadline: float) -> Any:
        """Call the Transaction service of one broker, once; the caller looks for errors in the response."""
        return await self._response(address, method, request, deadline, TRANSACTIONS.stub)

    async def describe_transactions(
        self, transactional_ids: Iterable[str], include_authorized_operations: bool, timeout: float | None
    ) -> dict[str, TransactionDescription]:
        """Return the descriptions of transactional ids, in the given order."""

        async def describe(transactional_id: str) -> TransactionDescription:
            request = transaction_pb2.DescribeTransactionsRequest(
                transactional_ids=[transactional_id], include_authorized_operations=include_authorized_operations
            )
            response = await self._at_coordinator(transactional_id, "DescribeTransactions", request, timeout)
            return describe_transaction(response.transactions[0])

        return await _each_transaction(names_of(transactional_ids), describe)

    async def abort_transaction(self, transactional_id: str, timeout: float | None) -> None:
        """Abort the open transaction of a transactional id."""
        request = transaction_pb2.AbortTransactionRequest(transactional_id=transactional_id)
        try:
            await self._at_coordinator(transactional_id, "AbortTransaction", request, timeout)
        except TransactionalIdNotFound:
            try:
                await self.describe_sink(transactional_id, timeout)
            except TransactionalIdNotFound:
                pass
            else:
                raise TransactionalIdNotFound(
                    f"there is no transactional id {transactional_id!r}, but a sink of staged batches of that name; "
                    f"end its open stages with: {abort_stages_command(transactional_id)}"
                ) from None
            raise

    async def describe_sink(self, sink_id: str, timeout: float | None) -> SinkDescription:
        """Return a sink's description by its coordinator."""
        request = transaction_pb2.LastBatchRequest(sink_id=sink_id)
        response: transaction_pb2.LastBatchResponse = await self._at_coordinator(sink_id, "LastBatch", request, timeout)
        if response.last_batch_id < 0 and not (response.target or response.stages):
            raise TransactionalIdNotFound(f"there is no sink {sink_id!r}")
        return describe_sink(sink_id, response)

    async def abort_stages(self, sink_id: str, batch_id: int | None, timeout: float | None) -> list[StageDescription]:
        """Abort the uncommitted stages of a sink, or of one of its batches; return those that were open."""
        is_open = [
            stage
            for stage in (await self.describe_sink(sink_id, timeout)).stages
            if stage.state == ONGOING and batch_id in (None, stage.batch_id)
        ]
        if is_open:
            request = transaction_pb2.AbortStagesRequest(
                sink_id=sink_id, producer_ids=[stage.producer_id for stage in is_open]
            )
            await self._at_coordinator(sink_id, "AbortStages", request, timeout)
        return is_open

    async def _at_coordinator(self, id_: str, method: str, request: Any, timeout: float | None) -> Any:
        """Call a method for one id; an error in the response for that id is raised, too."""

        async def attempt(deadline: float) -> Any:
            left_s = max(0.1, deadline - asyncio.get_running_loop().time())
            limit_s = min(left_s, self._options.request_timeout_ms / 1000)
            response = await self._transaction_coordinators.call(id_, method, request, limit_s)
            for each in getattr(response, "transactions", ()):
                if each.error.code:
                    error = from_wire(each.error)
                    if isinstance(error, (NotCoordinator, CoordinatorNotAvailable)):
                        self._transaction_coordinators.forget(id_)
                    raise error
            return response

        return await self._retried(attempt, timeout)

    # Producers and hanging transactions, as partitions know them

    async def describe_producers(
        self, topic: str, partition: int | None, timeout: float | None
    ) -> dict[TopicPartition, PartitionProducers]:
        """Return the producers known to partitions of a topic."""
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
        """Ask the leaders for producers; `missing` receives the reasons for partitions that are left out."""
        found: dict[TopicPartition, PartitionProducers] = {}
        reasons: dict[TopicPartition, RaftlogError] = {}

        async def attempt(deadline: float) -> None:
            reasons.clear()
            await self._find_brokers(topics={part.topic for part in ids})
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
            for reason in sorted(reasons.values(), key=lambda each: each.retriable):  # final errors first
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
        """Return the transactions that are open for too long on a partition and unknown to their coordinator."""
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
            # A transaction that ended between the two requests is in neither response.
            again = {part: ids[part] for part in (TopicPartition(each.topic, each.partition) for each in suspects)}
            still = {_key(each) for each in _open_at(await self._producers(again, untold, timeout))}
            suspects = [each for each in suspects if _key(each) in still]
        if missing is not None and untold:
            missing[:] = untold
        return suspects

    async def _coordinated(self, producer_ids: Collection[int], timeout: float | None) -> _Known:
        """Return the partitions where coordinators know of unfinished transactions of these producers.

        Raises:
            RaftlogError: not all coordinators have answered.
        """
        known = _Known(set(), {})
        for listed in await self.list_transactions(OPEN_STATES, producer_ids, 0, None, timeout):
            if listed.sink_id:  # a stage's producer id has no other transaction
                known.stages.add(listed.producer_id)
                continue
            try:
                described = (await self.describe_transactions([listed.transactional_id], False, timeout))[
                    listed.transactional_id
                ]
            except TransactionalIdNotFound:  # ended, and forgotten, since
                continue
            if described.state in OPEN_STATES:
                known.parts.setdefault(described.producer_id, set()).update(described.partitions)
        return known

    async def _how_to_end(self, producer_id: int, timeout: float | None) -> str:
        """Return the command by which a coordinator ends this producer's open transaction, as part of a sentence."""
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
        """Write an abort marker for a transaction that no coordinator knows; return the aborted transaction."""
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
            await self._metadata.refresh((part.topic,))
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
                    "is over, but it is not known what has ended it: this request, whose answer was lost, or its "
                    f"coordinator, which may have committed it ({error})"
                )
            # Otherwise an earlier attempt has aborted it, and its response was lost: no coordinator could commit it.

        await self._retried(attempt, timeout)
        return hanging

    # Users and permissions

    async def create_acls(self, bindings: AclBinding | Iterable[AclBinding], timeout: float | None) -> None:
        """Create ACLs."""
        request = security_pb2.CreateAclsRequest(acls=[_acl(each) for each in _each_change(bindings, AclBinding)])
        await self._secure("CreateAcls", request, timeout)

    async def describe_acls(self, filter_: AclFilter, timeout: float | None) -> list[AclBinding]:
        """Return the ACLs that a filter selects."""
        request = security_pb2.DescribeAclsRequest(filter=_acl(filter_), min_metadata_offset=self._metadata.min_offset)
        return [_binding(each) for each in (await self._secure("DescribeAcls", request, timeout)).acls]

    async def delete_acls(
        self, filters: AclFilter | Iterable[AclFilter], validate_only: bool, timeout: float | None
    ) -> list[AclBinding]:
        """Delete the ACLs that filters select, and return them."""
        request = security_pb2.DeleteAclsRequest(
            filters=[_acl(each) for each in _each_change(filters, AclFilter)], validate_only=validate_only
        )
        return [_binding(each) for each in (await self._secure("DeleteAcls", request, timeout)).deleted]

    async def alter_user(
        self,
        name: str,
        password: str,
        mechanism: str | ScramMechanism,
        iterations: int,
        only: bool,
        timeout: float | None,
    ) -> None:
        """Create a user, or change its password."""
        chosen = ScramMechanism.of(mechanism)
        request = security_pb2.AlterUsersRequest()
        request.upsertions.append(await asyncio.to_thread(credential, name, password, chosen, iterations))
        if only:
            for each in await self.describe_users(name, timeout):
                if each.mechanism != chosen:
                    request.deletions.append(_user_mechanism(name, each.mechanism))
        await self._secure("AlterUsers", request, timeout, done=ResourceNotFound)

    async def delete_user(self, name: str, mechanism: str | ScramMechanism | None, timeout: float | None) -> None:
        """Delete a user, or its credential for one mechanism."""
        if mechanism is not None:
            chosen = [ScramMechanism.of(mechanism)]
        else:
            chosen = [each.mechanism for each in await self.describe_users(name, timeout)]
            if not chosen:
                raise ResourceNotFound(f"there is no user {name!r}")
        request = security_pb2.AlterUsersRequest(deletions=[_user_mechanism(name, each) for each in chosen])
        await self._secure("AlterUsers", request, timeout, done=ResourceNotFound)

    async def describe_users(self, names: str | Iterable[str], timeout: float | None) -> list[UserScramCredential]:
        """Return the users and their mechanisms."""
        request = security_pb2.DescribeUsersRequest(
            users=names_of(names), min_metadata_offset=self._metadata.min_offset
        )
        response: security_pb2.DescribeUsersResponse = await self._secure("DescribeUsers", request, timeout)
        return sorted(
            UserScramCredential(each.user, ScramMechanism(each.mechanism), each.iterations) for each in response.users
        )

    async def create_role(
        self,
        name: str,
        permissions: AclBinding | Iterable[AclBinding],
        principals: str | Iterable[str],
        timeout: float | None,
    ) -> None:
        """Create a role."""
        alteration = security_pb2.RoleAlteration(
            name=name, action=security_pb2.RoleAlteration.CREATE, **_parts_of_role(permissions, (), principals, ())
        )
        await self._alter_role(alteration, timeout, done=DuplicateResource)

    async def alter_role(
        self,
        name: str,
        add: AclBinding | Iterable[AclBinding],
        remove: AclBinding | Iterable[AclBinding],
        grant: str | Iterable[str],
        revoke: str | Iterable[str],
        timeout: float | None,
    ) -> None:
        """Change a role's permissions and principals."""
        alteration = security_pb2.RoleAlteration(name=name, **_parts_of_role(add, remove, grant, revoke))
        await self._alter_role(alteration, timeout)

    async def delete_role(self, name: str, timeout: float | None) -> None:
        """Delete a role."""
        alteration = security_pb2.RoleAlteration(name=name, action=security_pb2.RoleAlteration.DELETE)
        await self._alter_role(alteration, timeout, done=ResourceNotFound)

    async def _alter_role(self, alteration: security_pb2.RoleAlteration, timeout: float | None, **more: Any) -> None:
        await self._secure("AlterRoles", security_pb2.AlterRolesRequest(alterations=[alteration]), timeout, **more)

    async def describe_roles(
        self, names: str | Iterable[str], principal: str | None, timeout: float | None
    ) -> list[Role]:
        """Return roles with their permissions and principals."""
        request = security_pb2.DescribeRolesRequest(
            names=names_of(names), principal=principal or "", min_metadata_offset=self._metadata.min_offset
        )
        response: security_pb2.DescribeRolesResponse = await self._secure("DescribeRoles", request, timeout)
        return [
            Role(each.name, tuple(map(_binding, each.permissions)), tuple(each.principals)) for each in response.roles
        ]

    # Quotas

    async def alter_client_quotas(
        self, alterations: Mapping[QuotaEntity, Mapping[str, float | None]], validate_only: bool, timeout: float | None
    ) -> None:
        """Set quotas, and remove those with None."""
        request = admin_pb2.AlterClientQuotasRequest(validate_only=validate_only)
        for entity, values in alterations.items():
            for key, value in values.items():
                request.alterations.add(entity=_quota_entity(entity), key=key, value=value)
        await self._anyone("AlterClientQuotas", request, timeout)

    async def describe_client_quotas(
        self, filter_: QuotaEntity, strict: bool, timeout: float | None
    ) -> dict[QuotaEntity, dict[str, float]]:
        """Return the quotas that a filter selects."""
        request = admin_pb2.DescribeClientQuotasRequest(
            filter=_quota_entity(filter_), strict=strict, min_metadata_offset=self._metadata.min_offset
        )
        response = await self._anyone("DescribeClientQuotas", request, timeout)
        found: dict[QuotaEntity, dict[str, float]] = {}
        for each in response.quotas:
            wire = each.entity
            entity = QuotaEntity(
                wire.user if wire.HasField("user") else None,
                wire.client_id if wire.HasField("client_id") else None,
                wire.ip if wire.HasField("ip") else None,
            )
            found.setdefault(entity, {})[each.key] = each.value
        return found

    async def _secure(self, method: str, request: Any, timeout: float | None, **more: Any) -> Any:
        return await self._anyone(method, request, timeout, service=security_stub, **more)


def _quota_entity(entity: QuotaEntity) -> records_pb2.QuotaEntity:
    return records_pb2.QuotaEntity(user=entity.user, client_id=entity.client_id, ip=entity.ip)


def as_config(value: Any) -> str:
    """Return a config value as text: true and false as Kafka writes them, lists with commas."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(map(str, value))
    return str(value)


def resource_of(
    topic: str | None, broker: int | str | None, broker_logger: int | None = None
) -> records_pb2.ConfigResource:
    """Return the named resource.

    Raises:
        InvalidRequestError: the caller named none, or more than one.
    """
    if sum(each is not None for each in (topic, broker, broker_logger)) != 1:
        raise InvalidRequestError(
            'name a topic, a broker or broker_logger, one of them; broker="" is the default for all brokers'
        )
    if broker_logger is not None:
        return records_pb2.ConfigResource(type=records_pb2.ConfigResource.BROKER_LOGGER, name=str(broker_logger))
    if topic is not None:
        return records_pb2.ConfigResource(type=records_pb2.ConfigResource.TOPIC, name=topic)
    return records_pb2.ConfigResource(type=records_pb2.ConfigResource.BROKER, name=str(broker))
