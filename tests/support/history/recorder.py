"""Takes notes of a cluster on loopback while a test breaks it: faults, absent and isolated nodes, and leaders."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Final

from raftlog import Admin
from raftlog.errors import RaftlogError
from raftlog.testing import Cluster
from tests.support.history import availability, timeline
from tests.support.history.model import WRITES, Condition, Cut, Fault, History, Ill, Kind, Operation, Problem, Reign
from tests.support.history.verdict import describe

_ASK_S: Final = 0.25
_ANSWER_S: Final = 1.0


class WatchedCluster(Cluster):
    """A cluster that notes what is done to its servers: `conditions` and `cuts`; arguments as `Cluster`."""

    def __init__(self, nodes: int = 1, **options: Any) -> None:
        super().__init__(nodes, **options)
        self._lock = threading.Lock()
        self.conditions: list[Condition] = []
        self.cuts: list[Cut] = []

    def kill(self, node_id: int) -> None:
        self._falls(node_id, "dead")
        super().kill(node_id)

    def stop(self, node_id: int) -> None:
        self._falls(node_id, "dead")
        super().stop(node_id)

    def start(self, node_id: int, *, wait: bool = True) -> None:
        super().start(node_id, wait=wait)
        self._rises(node_id)

    def start_all(self) -> None:
        super().start_all()
        for node_id in self.node_ids:
            self._rises(node_id)

    def pause(self, node_id: int) -> None:
        self._falls(node_id, "paused")
        super().pause(node_id)

    def resume(self, node_id: int) -> None:
        super().resume(node_id)
        self._rises(node_id)

    def partition(self, some: Iterable[int], others: Iterable[int], *, one_way: bool = False) -> None:
        some, others = list(some), list(others)
        now_s = time.monotonic()
        super().partition(some, others, one_way=one_way)
        pairs = [(one, other) for one in some for other in others]
        pairs += [] if one_way else [(other, one) for one, other in pairs]
        with self._lock:
            self.cuts += [Cut(sender, receiver, now_s, None) for sender, receiver in pairs]

    def heal(self) -> None:
        super().heal()
        now_s = time.monotonic()
        with self._lock:
            self.cuts = [replace(each, end_s=now_s) if each.end_s is None else each for each in self.cuts]

    def __enter__(self) -> WatchedCluster:
        super().__enter__()
        return self

    def _falls(self, node_id: int, ill: Ill) -> None:
        with self._lock:
            self.conditions.append(Condition(node_id, ill, time.monotonic(), None))

    def _rises(self, node_id: int) -> None:
        now_s = time.monotonic()
        with self._lock:
            self.conditions = [
                replace(each, end_s=now_s) if each.node == node_id and each.end_s is None else each
                for each in self.conditions
            ]


class RoleWatch(threading.Thread):
    """Asks now and then which node is the controller, and which nodes lead the partitions of a topic, if given.

    A reign ends when another node was named, or with the last answer if no node answers any more.
    """

    def __init__(self, bootstrap: str, topic: str | None) -> None:
        super().__init__(name="role-watch", daemon=True)
        self.over = threading.Event()
        self._servers, self._topic = bootstrap, topic
        self._reigns: list[Reign] = []
        self._open: dict[int | None, Reign] = {}
        self._lock = threading.Lock()

    def run(self) -> None:
        with Admin(self._servers, default_api_timeout_ms=int(_ANSWER_S * 1000)) as admin:
            while not self.over.wait(_ASK_S):
                self.note(self._ask(admin), time.monotonic())

    def _ask(self, admin: Admin) -> dict[int | None, int]:
        named: dict[int | None, int] = {}
        with contextlib.suppress(RaftlogError):
            named[None] = admin.describe_cluster(linearizable=True, timeout=_ANSWER_S).controller_id
        if self._topic is not None:
            with contextlib.suppress(RaftlogError):
                described = admin.describe_topic(self._topic, timeout=_ANSWER_S)
                named |= {number: part.leader for number, part in enumerate(described.partitions)}
        return {what: node for what, node in named.items() if node > 0}

    def close(self) -> None:
        """Ask no more; returns when the last question is answered, or given up."""
        self.over.set()
        self.join(3 * _ANSWER_S)

    def note(self, named: dict[int | None, int], at_s: float) -> None:
        """Note the leader of each partition, and the controller (None)."""
        with self._lock:
            for what in [what for what, reign in self._open.items() if named.get(what) != reign.node]:
                reign = self._open.pop(what)
                self._reigns.append(replace(reign, end_s=at_s) if what in named else reign)
            for what, node in named.items():
                begin_s = self._open[what].begin_s if what in self._open else at_s
                self._open[what] = Reign(node, what, begin_s, at_s)

    @property
    def reigns(self) -> list[Reign]:
        """Everything so far."""
        with self._lock:
            return [*self._reigns, *self._open.values()]


class Recorder:
    """Makes the history of the block that it is the context of, checks how available the cluster was, and draws it.

    Args:
        cluster: what is broken.
        topic: the topic whose leaders are noted; None: only the controller is.
        promised_s: how long writes to a partition may pause while a majority could exist.
        notes: where operations come from; asked when the block is over, however it ended.
        writes: the kinds of operations that must go on.
        title: None is the name of the test.

    Raises:
        AssertionError: writes paused for longer (if the block did not fail already).
    """

    def __init__(
        self,
        cluster: WatchedCluster,
        topic: str | None,
        promised_s: float,
        *notes: Callable[[], Iterable[Operation]],
        writes: tuple[Kind, ...] = WRITES,
        title: str | None = None,
    ) -> None:
        self.title = timeline.running_test() if title is None else title
        self.faults: list[Fault] = []
        self._cluster = cluster
        self._promised_s = promised_s
        self._notes = notes
        self._writes = writes
        self._watch = RoleWatch(cluster.bootstrap, topic)

    def __enter__(self) -> Recorder:
        self._watch.start()
        return self

    @contextmanager
    def fault(self, name: str, *targets: int) -> Iterator[None]:
        """Record a fault of the cluster over the block."""
        self.faults.append(Fault(name, time.monotonic(), None, targets))
        index = len(self.faults) - 1
        try:
            yield
        finally:
            self.faults[index] = replace(self.faults[index], end_s=time.monotonic())

    def history(self) -> History:
        """Return what is known by now."""
        until_s = time.monotonic()
        return History(
            self.title,
            self._cluster.node_ids,
            self._cluster.controller_ids,
            [operation for note in self._notes for operation in note()],
            list(self.faults),
            list(self._cluster.conditions),
            list(self._cluster.cuts),
            self._watch.reigns,
            until_s,
            self._writes,
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch.close()
        history = self.history()
        problems: list[Problem] = availability.check(history, self._promised_s)
        timeline.draw(history, problems, error)
        assert error is not None or not problems, describe(problems)
