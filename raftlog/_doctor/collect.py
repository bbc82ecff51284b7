"""Asks a cluster everything that checks are made of. What nobody answers is missing in the picture, with the reason."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Final, TypeVar

import raftlog
from raftlog._core.words import counted
from raftlog._descriptions import ClusterDescription, ConfigDescription, PartitionReplicas, TopicDescription
from raftlog._doctor import sight
from raftlog._doctor.picture import Picture, Unanswered
from raftlog._group_descriptions import GroupListing, PartitionLag
from raftlog._node_descriptions import NodeDescription
from raftlog._transaction_descriptions import MAX_TRANSACTION_TIMEOUT_MS
from raftlog.errors import AuthorizationError, RaftlogError
from raftlog.types import TopicPartition

K = TypeVar("K")
T = TypeVar("T")

PATIENCE_S: Final = 5.0
"""How long one question may take."""
AWAY_S: Final = 1.0
"""The same for a node that others do not hear of; it may answer all the same."""
ALL_S: Final = 30.0
"""How long one kind of question may take, of all nodes, topics or groups together; the rest is not asked."""
INTERVAL_S: Final = 3.0
"""Between two looks: long enough to see that something moves, short enough to wait for."""
AT_A_TIME: Final = 8

Lags = Mapping[str, Mapping[TopicPartition, PartitionLag]]


def collect(admin: raftlog.Admin, *, interval_s: float = INTERVAL_S) -> Picture:
    """Return what the cluster says; with `interval_s` 0 from one look only.

    Raises:
        RaftlogError: nobody answers at all.
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
        """Ask everything."""
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
            # What is as new as the replicas are: else a broker that died meanwhile would seem to be only slow.
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
        silent.clear()  # whoever answers the second time is not silent
        for broker, why in errors.items():
            if isinstance(why, AuthorizationError):
                self._unanswered.append(_unanswered("replicas", f"leader {broker}", why))
            else:
                silent[broker] = str(why)
        return None if not found and errors and not silent else found

    def _lags(self, groups: list[GroupListing] | None) -> Lags | None:
        if groups is None:
            return None
        return self._many(
            "lags",
            [group.group_id for group in groups],
            lambda group_id: self._admin.group_lag(group_id, timeout=PATIENCE_S),
            "group",
        )

    def _configs(self, topics: list[TopicDescription] | None) -> Mapping[str, Mapping[str, ConfigDescription]] | None:
        if topics is None:
            return None
        return self._many(
            "configs",
            [topic.name for topic in topics],
            lambda name: self._admin.describe_configs(topic=name, timeout=PATIENCE_S),
            "topic",
        )

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
                    raise each  # it takes Read of the topics, which who only looks need not have: not looked at
            return found

        return self._answer("hanging", self._pool.submit(self._with_missing, "hanging", ask))

    def _hidden(
        self,
        cluster: ClusterDescription,
        topics: list[TopicDescription] | None,
        nodes: Mapping[int, NodeDescription] | None,
    ) -> Sequence[str]:
        """Return topics that this user may not describe; a note of transactions, where those are left out of lists."""
        if topics is None or not sight.may_be_restricted(nodes):
            return ()
        found, refused = sight.hidden_topics(self._admin, cluster, topics, PATIENCE_S)
        if refused is not None:
            self._unanswered.append(_unanswered("topics", "some", refused))
        if (refusal := sight.refused_transactions(self._admin, topics, found, PATIENCE_S)) is not None:
            self._unanswered.append(_unanswered("transactions", "some", refusal))
        return found

    # How they are asked

    def _answer(self, part: str, asked: Future[T]) -> T | None:
        """Return an answer; None, and a note of it, when there is none."""
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

    def _many(self, part: str, keys: Iterable[K], ask: Callable[[K], T], what: str) -> dict[K, T] | None:
        """Ask for each key, some at a time; who does not answer, and who was not asked in time, is noted.

        None: all refuse, so that nothing of it was looked at.
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
