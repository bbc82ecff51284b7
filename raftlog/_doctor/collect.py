"""Asks a cluster for everything that checks need. If a question has no answer, its field stays empty, with the reason.

Lists silently leave out topics that this user may not describe. But for users that may describe the cluster,
DescribeLogDirs names all partitions on brokers' disks. The doctor asks for the missing topics by name, and so learns
whether the user lacks the permission or the topic is gone.

Also here: metrics from metrics listeners, and ends of local logs, for the support bundle.
"""

from __future__ import annotations

import http.client
import os
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final, TypeVar

import raftlog
from raftlog._core.descriptions import (
    MAX_TRANSACTION_TIMEOUT_MS,
    BrokerDescription,
    ClusterDescription,
    ConfigDescription,
    GroupListing,
    NodeDescription,
    PartitionLag,
    PartitionReplicas,
    QuorumDescription,
    TopicDescription,
)
from raftlog._core.words import counted
from raftlog._doctor.picture import Picture, Unanswered
from raftlog.errors import AuthorizationError, RaftlogError
from raftlog.types import TopicPartition

ASKED: Final = 50
"""The most topics that are asked for by name; if one of them is refused, the rest are assumed to be refused too."""
TRANSACTIONS_TOPIC: Final = "__transaction_state"
_UNUSED_ID: Final = "raftlog-doctor-looks"


def may_be_restricted(nodes: Mapping[int, NodeDescription] | None) -> bool:
    """Return whether a broker may have an authorizer: false only if all brokers report that they have none."""
    for node in (nodes or {}).values():
        if "broker" in node.roles:
            found = node.configs.get("authorizer")
            if found is None or found.value not in ("", "none"):
                return True
    return not nodes


def hidden_topics(
    admin: raftlog.Admin, cluster: ClusterDescription, topics: Sequence[TopicDescription], patience_s: float
) -> tuple[Sequence[str], AuthorizationError | None]:
    """Return the names of brokers' topics that this user may not describe, and one of the errors.

    The names are empty if brokers do not list their topics.
    """
    there: set[str] = set()
    for broker in cluster.brokers:
        if not broker.fenced:
            try:
                found = admin.describe_log_dirs(broker.broker_id, timeout=patience_s)
            except RaftlogError:
                continue  # nodes need the same permission, and note its lack
            there.update(part.topic for each in found for part in each.partitions)
    candidates = sorted(there - {topic.name for topic in topics} - {""})
    refusals = {name: _refusal(admin, name, patience_s) for name in candidates[:ASKED]}
    refused = [name for name, refusal in refusals.items() if refusal is not None]
    if not refused:
        return (), None
    return [*refused, *candidates[ASKED:]], refusals[refused[0]]


def refused_transactions(
    admin: raftlog.Admin, topics: Sequence[TopicDescription], hidden: Sequence[str], patience_s: float
) -> AuthorizationError | None:
    """Return why a list may leave out transactions; None if it leaves out none, or the cluster never had one."""
    if TRANSACTIONS_TOPIC not in {*hidden, *(topic.name for topic in topics)}:
        return None  # the request would create the topic
    try:
        admin.describe_transaction(_UNUSED_ID, timeout=patience_s)
    except AuthorizationError as error:
        return error
    except RaftlogError:  # no transaction has this id
        return None
    return None


def _refusal(admin: raftlog.Admin, topic: str, patience_s: float) -> AuthorizationError | None:
    try:
        admin.describe_topics([topic], internal=True, timeout=patience_s)
    except AuthorizationError as error:
        return error
    except RaftlogError:  # deleted since
        return None
    return None


METRICS_S: Final = 5.0
METRICS_BYTES: Final = 64 << 20
LOG_BYTES: Final = 4 << 20
"""The most bytes that are read from the end of a log."""
_ANY: Final = ("", "0.0.0.0", "::", "[::]")


def metrics_address(
    node: NodeDescription, broker: BrokerDescription | None, quorum: QuorumDescription | None
) -> tuple[str, int] | None:
    """Return the address of a node's metrics, at its host if it listens on all addresses; None without a listener."""
    host, _, port = node.metrics_listener.rpartition(":")
    if not port:
        return None
    if host in _ANY:
        voters = {voter.node_id: voter.host for voter in quorum.voters} if quorum is not None else {}
        host = broker.host if broker is not None else voters.get(node.node_id, "") or node.hostname
    return host.strip("[]"), int(port)


def read_metrics(host: str, port: int) -> bytes:
    """Return a node's metrics in Prometheus' text format.

    Raises:
        OSError, http.client.HTTPException: the node does not answer, or answers with an error; the message says why.
    """
    connection = http.client.HTTPConnection(host, port, timeout=METRICS_S)
    try:
        connection.request("GET", "/metrics", headers={"Accept": "text/plain"})
        response = connection.getresponse()
        body = response.read(METRICS_BYTES)
        if response.status != http.client.OK:
            raise OSError(f"http://{host}:{port}/metrics answers with status {response.status}")
        return body
    finally:
        connection.close()


def local_log(node: NodeDescription) -> Path | None:
    """Return a node's log if it is a file on this machine; None: it is on another machine, or not a file.

    A node must not be able to make this process read an arbitrary file: the process that the node names must have this
    file as its standard error.

    Raises:
        OSError: the process belongs to another user, is gone, or does not log to this file.
    """
    if not node.log_file or node.hostname != socket.gethostname():
        return None
    path = os.readlink(f"/proc/{node.pid}/fd/2")
    if path != node.log_file:
        raise OSError(f"process {node.pid} on this machine does not log to {node.log_file}")
    return Path(path)


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a text file, from its last `LOG_BYTES`.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - LOG_BYTES))
        text = file.read(LOG_BYTES).decode(errors="backslashreplace")
    found = text.splitlines()
    if size > LOG_BYTES:
        del found[:1]  # it may be incomplete
    return found[-lines:]


K = TypeVar("K")
T = TypeVar("T")

PATIENCE_S: Final = 5.0
"""How long one question may take."""
AWAY_S: Final = 1.0
"""The same for a node that is fenced, or that others cannot reach; it may answer nevertheless."""
ALL_S: Final = 30.0
"""How long one kind of question may take for all nodes, topics or groups; the rest is skipped."""
INTERVAL_S: Final = 3.0
"""Time between two readings: long enough to see progress, short enough to wait for."""
AT_A_TIME: Final = 8

Lags = Mapping[str, Mapping[TopicPartition, PartitionLag]]


def collect(admin: raftlog.Admin, *, interval_s: float = INTERVAL_S) -> Picture:
    """Return the state of the cluster from two readings, or from one if `interval_s` is 0.

    Raises:
        RaftlogError: the cluster does not answer at all.
    """
    with ThreadPoolExecutor(AT_A_TIME, thread_name_prefix="doctor") as pool:
        return _Collector(admin, pool).picture(interval_s)


class _Collector:
    """One round of questions."""

    def __init__(self, admin: raftlog.Admin, pool: ThreadPoolExecutor) -> None:
        self._admin = admin
        self._pool = pool
        self._unanswered: list[Unanswered] = []

    def picture(self, interval_s: float) -> Picture:
        """Ask all questions."""
        admin = self._admin
        cluster = admin.describe_cluster(timeout=PATIENCE_S)
        asked: dict[str, Future[Any]] = {
            "quorum": self._pool.submit(admin.describe_quorum, timeout=PATIENCE_S),
            "topics": self._pool.submit(admin.describe_topics, internal=True, timeout=PATIENCE_S),
            "groups": self._pool.submit(self._with_missing, "groups", admin.list_groups),
            "transactions": self._pool.submit(self._with_missing, "transactions", admin.list_transactions),
        }
        found: dict[str, Any] = {part: self._answer(part, answer) for part, answer in asked.items()}
        topics: list[TopicDescription] | None = found["topics"]
        groups: list[GroupListing] | None = found["groups"]

        node_ids = {broker.broker_id for broker in cluster.brokers}
        away = {broker.broker_id for broker in cluster.brokers if broker.fenced}
        if found["quorum"] is not None:
            node_ids |= {voter.node_id for voter in found["quorum"].voters}
            away |= {voter.node_id for voter in found["quorum"].voters if voter.state == "unreachable"}
        nodes = self._many(
            "nodes",
            sorted(node_ids),
            lambda node_id: admin.describe_node(node_id, timeout=AWAY_S if node_id in away else PATIENCE_S),
            "node",
        )
        hidden = self._pool.submit(self._hidden, cluster, topics, nodes)
        silent_leaders: dict[int, str] = {}
        replicas = self._replicas(topics, silent_leaders)
        lags = self._lags(groups)
        looked_s = time.monotonic()
        configs = self._configs(topics)
        hanging = self._hanging(topics, nodes)

        replicas_before = lags_before = None
        apart_s = 0.0
        if interval_s > 0:
            time.sleep(max(0.0, looked_s + interval_s - time.monotonic()))
            replicas_before, lags_before = replicas, lags
            # As recent as the replicas: otherwise a broker that died meanwhile would only look slow.
            brokers = self._pool.submit(self._safely, lambda: admin.describe_cluster(timeout=PATIENCE_S))
            again = self._pool.submit(self._safely, lambda: admin.describe_topics(internal=True, timeout=PATIENCE_S))
            replicas, lags = self._replicas(topics, silent_leaders), self._lags(groups)
            cluster, topics = brokers.result() or cluster, again.result() or topics
            apart_s = time.monotonic() - looked_s
        return Picture(
            taken_at_ms=round(time.time() * 1000),
            apart_s=apart_s,
            cluster=cluster,
            quorum=found["quorum"],
            topics=topics,
            hidden_topics=hidden.result(),
            configs=configs,
            replicas=replicas,
            replicas_before=replicas_before,
            silent_leaders=silent_leaders,
            nodes=nodes,
            silent_nodes={
                node_id: next((each.why for each in self._unanswered if each.who == f"node {node_id}"), "")
                for node_id in sorted(node_ids - (nodes or {}).keys())
            },
            groups=groups,
            lags=lags,
            lags_before=lags_before,
            hanging=hanging,
            transactions=found["transactions"],
            unanswered=tuple(dict.fromkeys(self._unanswered)),
        )

    # Questions

    def _replicas(
        self, topics: list[TopicDescription] | None, silent: dict[int, str]
    ) -> dict[TopicPartition, PartitionReplicas] | None:
        if topics is None:
            return None
        errors: dict[int, RaftlogError] = {}
        asked = self._pool.submit(
            self._admin.describe_replicas, [topic.name for topic in topics], silent=errors, timeout=PATIENCE_S
        )
        found = self._answer("replicas", asked)
        silent.clear()  # a leader that answers the second time is not silent
        for broker, why in errors.items():
            if isinstance(why, AuthorizationError):
                self._unanswered.append(_unanswered("replicas", f"leader {broker}", why))
            else:
                silent[broker] = str(why)
        return None if not found and errors and not silent else found

    def _lags(self, groups: list[GroupListing] | None) -> Lags | None:
        if groups is None:
            return None
        return self._together("lags", [group.group_id for group in groups], self._admin.group_lags, "group")

    def _configs(self, topics: list[TopicDescription] | None) -> Mapping[str, Mapping[str, ConfigDescription]] | None:
        if topics is None:
            return None
        return self._together("configs", [topic.name for topic in topics], self._admin.describe_topic_configs, "topic")

    def _hanging(self, topics: list[TopicDescription] | None, nodes: Mapping[int, NodeDescription] | None) -> Any:
        if topics is None:
            return None
        limits = [
            int(found.value)
            for node in (nodes or {}).values()
            if (found := node.configs.get("transaction.max.timeout.ms")) is not None
        ]
        longest_ms = max(limits, default=MAX_TRANSACTION_TIMEOUT_MS)

        def ask(*, missing: list[RaftlogError], timeout: float) -> Any:
            found = self._admin.find_hanging_transactions(
                max_transaction_timeout_ms=longest_ms, missing=missing, timeout=timeout
            )
            for each in missing:
                if isinstance(each, AuthorizationError):
                    raise each  # it needs Read on topics, which a user that only monitors need not have
            return found

        return self._answer("hanging", self._pool.submit(self._with_missing, "hanging", ask))

    def _hidden(
        self,
        cluster: ClusterDescription,
        topics: list[TopicDescription] | None,
        nodes: Mapping[int, NodeDescription] | None,
    ) -> Sequence[str]:
        """Return topics that this user may not describe; note them, and transactions that lists leave out."""
        if topics is None or not may_be_restricted(nodes):
            return ()
        found, refused = hidden_topics(self._admin, cluster, topics, PATIENCE_S)
        if refused is not None:
            self._unanswered.append(_unanswered("topics", "some", refused))
        if (refusal := refused_transactions(self._admin, topics, found, PATIENCE_S)) is not None:
            self._unanswered.append(_unanswered("transactions", "some", refusal))
        return found

    # Asking

    def _answer(self, part: str, asked: Future[T]) -> T | None:
        """Return an answer; without one, note the error and return None."""
        try:
            return asked.result()
        except RaftlogError as error:
            self._unanswered.append(_unanswered(part, "all", error))
            return None

    def _with_missing(self, part: str, ask: Callable[..., T]) -> T:
        missing: list[RaftlogError] = []
        found = ask(missing=missing, timeout=PATIENCE_S)
        self._unanswered += [_unanswered(part, "some", error) for error in missing]
        return found

    @staticmethod
    def _safely(ask: Callable[[], T]) -> T | None:
        try:
            return ask()
        except RaftlogError:
            return None

    def _together(
        self, part: str, keys: Sequence[str], ask: Callable[..., dict[str, T]], what: str
    ) -> dict[str, T] | None:
        """Ask for all keys at once; note the keys without an answer. None: all were refused, for lack of permission."""
        if not keys:
            return {}
        errors: dict[str, RaftlogError] = {}
        found = self._answer(part, self._pool.submit(ask, keys, missing=errors, timeout=PATIENCE_S))
        self._unanswered += [_unanswered(part, f"{what} {key}", error) for key, error in errors.items()]
        refused = sum(isinstance(error, AuthorizationError) for error in errors.values())
        return None if refused == len(keys) else found

    def _many(self, part: str, keys: Iterable[K], ask: Callable[[K], T], what: str) -> dict[K, T] | None:
        """Ask for each key, some at a time; note the keys without an answer, and those that were skipped to save time.

        None: all were refused, for lack of permission.
        """
        deadline_s = time.monotonic() + ALL_S

        def one(key: K) -> T | RaftlogError | None:
            if time.monotonic() >= deadline_s:
                return None
            try:
                return ask(key)
            except RaftlogError as error:
                return error

        found: dict[K, T] = {}
        wanted = list(keys)
        left = refused = 0
        for key, answer in zip(wanted, self._pool.map(one, wanted), strict=True):
            if answer is None:
                left += 1
            elif isinstance(answer, RaftlogError):
                self._unanswered.append(_unanswered(part, f"{what} {key}", answer))
                refused += isinstance(answer, AuthorizationError)
            else:
                found[key] = answer
        if left:
            why = f"not asked: the others took {ALL_S:.0f} s"
            self._unanswered.append(Unanswered(part, counted(left, f"more {what}"), why))
        return None if wanted and refused == len(wanted) else found


def _unanswered(part: str, who: str, error: RaftlogError) -> Unanswered:
    return Unanswered(part, who, str(error), isinstance(error, AuthorizationError))
