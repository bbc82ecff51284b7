"""One run: clients at work on a cluster, faults one after the other, and what is checked when everything is mended."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from raftlog.errors import OffsetOutOfRange, RaftlogError
from tests.chaos.availability import Starvation, longest_pause
from tests.chaos.faults import Fault
from tests.chaos.nodes import NodeSet
from tests.chaos.operations import Operation, Operations
from tests.chaos.transfers import Transfers
from tests.support.append_checker import assert_sound
from tests.support.append_workload import AppendWorkload, read_replicas
from tests.support.group_checker import assert_sound as assert_group_sound
from tests.support.group_workload import GroupWorkload
from tests.support.history.containers import drawn
from tests.support.history.model import Operation as Noted
from tests.support.history.recorder import RoleWatch
from tests.support.history.timeline import running_test
from tests.support.history.workloads import of_appends, of_group, polls

PARTITIONS: Final = 3
Workload = Literal["append", "transactions", "groups"]
ALL: Final[tuple[Workload, ...]] = ("append", "transactions", "groups")
_RESUME_S: Final = 30.0
"""After this the test gives up waiting; what is promised is shorter."""


@dataclass
class Run:
    """Clients at work on a topic of their own."""

    nodes: NodeSet
    topic: str
    appends: AppendWorkload | None
    transfers: Transfers | None
    groups: GroupWorkload | None
    operations: Operations = field(default_factory=Operations)
    pauses: list[float] = field(default_factory=list)
    """How long writes paused at each fault that others are promised to go on through."""

    @property
    def topics(self) -> list[str]:
        """The topics that clients write into."""
        there = zip(topics_of(self.topic), (self.appends, self.transfers, self.groups), strict=True)
        return [name for name, workload in there if workload is not None]

    def suffer(self, fault: Fault) -> None:
        """Let a fault happen, look on for a while, mend it, and see that everything goes on.

        Raises:
            AssertionError: it did not, or not in the promised time.
        """
        pids = {node.node_id: node.server_pid for node in self.nodes.nodes.values()}
        before, began_s = Starvation.now(pids.values()), time.monotonic()
        try:
            fault.begin(self.nodes, self.topics[0])
            begun_s = time.monotonic()
            if fault.keeps_serving:
                self._wait_resumed(begun_s)
            time.sleep(fault.hold_s)
            self._judge("while it lasted", fault, before, began_s, is_promised=fault.keeps_serving)
        finally:
            ending_s, before = time.monotonic(), Starvation.now(pids.values())
            fault.end(self.nodes)
            self.operations.add(Operation("fault", fault.name, began_s, time.monotonic(), "ok", fault.victim))
        self.mended(ending_s)
        self._judge("after it", fault, before, ending_s, is_promised=fault.heals_in_time)

    def mended(self, since_s: float) -> None:
        """Wait until every client goes on and every replica is in sync.

        Raises:
            AssertionError: they do not.
        """
        self._wait_resumed(since_s)
        self.nodes.wait_ready()
        if self.transfers is not None:
            self.transfers.wait_for_progress()
        if self.groups is not None:
            self.groups.wait_for_progress()
        for topic in self.topics:
            self.nodes.wait_in_sync(topic)

    def _wait_resumed(self, since_s: float) -> None:
        """Wait until every partition has acknowledged something that was sent since."""
        if self.appends is None:
            for other in (self.transfers, self.groups):
                if other is not None:
                    other.wait_for_progress()
            return
        deadline_s = time.monotonic() + _RESUME_S
        missing = set(range(PARTITIONS))
        while missing:
            assert time.monotonic() < deadline_s, (
                f"the partitions {missing} take no writes within {_RESUME_S:g} s after the fault"
            )
            for appender in self.appends.appenders:
                fresh = reversed(appender.appends[-200:])
                missing -= {each.partition for each in fresh if each.offset is not None and each.invoked_at > since_s}
            time.sleep(0.01)

    def _judge(self, when: str, fault: Fault, before: Starvation, since_s: float, *, is_promised: bool) -> None:
        """Say how long writes paused, and hold that against the promise."""
        if self.appends is None:
            return
        until_s = time.monotonic()
        starved_s = before.until(Starvation.now(before.waited_s))
        pause_s, partition = longest_pause(self.acknowledged_at(), since_s, until_s)
        told = (
            f"{fault.name} (node {fault.victim}{', the controller' if fault.hit_controller else ''}), {when}: "
            f"partition {partition} paused for {pause_s:.2f} s of {until_s - since_s:.1f} s; promised "
            f"{f'{fault.promised_s:g} s' if is_promised else 'nothing'}, starved {starved_s:.2f} s"
        )
        print(told)
        if is_promised:
            self.pauses.append(pause_s)
            assert pause_s <= fault.promised_s + starved_s, told

    def acknowledged_at(self) -> dict[int, list[float]]:
        """Return when each partition acknowledged appends."""
        found: dict[int, list[float]] = {partition: [] for partition in range(PARTITIONS)}
        for appender in self.appends.appenders if self.appends is not None else ():
            for each in list(appender.appends):
                if each.offset is not None and each.returned_at is not None:
                    found[each.partition].append(each.returned_at)
        return found

    def finish(self) -> None:
        """Stop the clients, and check everything that they saw.

        Raises:
            AssertionError: something is lost, doubled, reordered, torn, or differs between replicas.
        """
        if self.transfers is not None:
            self.transfers.stop()
            problems = self.transfers.problems()
            assert not problems, "\n".join(problems[:20])
            assert self.transfers.committed, "no transaction was committed in the whole run"
        if self.groups is not None:
            self.groups.stop()
            assert_group_sound(self.groups.history())
        if self.appends is not None:
            self._finish_appends(self.appends)

    def recorded(self) -> list[Operation]:
        """Return the recorded operations, except for appends, which are recorded while they happen."""
        return [each for each in self.operations.all if each.kind != "append"]

    def noted(self) -> list[Noted]:
        """Return what clients have noted so far."""
        found = [] if self.appends is None else list(of_appends(self.appends))
        found += [] if self.transfers is None else polls(self.transfers.polls, client="committed-reader")
        return found if self.groups is None else found + list(of_group(self.groups))

    def abandon(self) -> None:
        """Tell every client to end, without waiting."""
        if self.transfers is not None:
            self.transfers.abandon()
        if self.groups is not None:
            self.groups.abandon()
        if self.appends is not None:
            for over in [each.over for each in self.appends.appenders] + [each.over for each in self.appends.pollers]:
                over.set()

    def _finish_appends(self, appends: AppendWorkload) -> None:
        appends.stop()
        self.nodes.wait_in_sync(self.topic)
        final, raw = asyncio.run(read_replicas(self.nodes.addresses, PARTITIONS, self.topic))
        first = self.nodes.brokers[0].node_id
        appends.stop_pollers(final[first])
        history = appends.history(final)
        for each in history.appends:
            outcome: Literal["ok", "unknown"] = "ok" if each.offset is not None else "unknown"
            self.operations.add(
                Operation(
                    "append", f"producer-{each.producer}", each.invoked_at, each.returned_at, outcome,
                    partition=each.partition, detail=f"{each.value.decode()} {each.offset}",
                )
            )  # fmt: skip
        print(f"{appends.acknowledged} of {len(history.appends)} appends acknowledged; {self._errors(appends)}")
        assert_sound(history)
        assert all(log == raw[first] for log in raw.values()), "the logs of the replicas are not the same byte for byte"
        for poller in appends.pollers:
            assert not any(isinstance(error, OffsetOutOfRange) for error in poller.errors), poller.errors[:3]
        refused = [error for each in appends.appenders if each.retries for error in each.errors]
        assert not refused, f"clients that retry must see no errors, but some did: {refused[:3]}"

    @staticmethod
    def _errors(appends: AppendWorkload) -> str:
        by_kind: dict[type[RaftlogError], int] = defaultdict(int)
        for each in appends.appenders:
            for error in each.errors:
                by_kind[type(error)] += 1
        return ", ".join(f"{count} x {kind.__name__}" for kind, count in by_kind.items()) or "no errors"


def topics_of(topic: str) -> tuple[str, str, str]:
    """Return the topics of the workloads."""
    return topic, f"{topic}-transfers", f"{topic}-groups"


@contextmanager
def at_work(nodes: NodeSet, topic: str, directory: Path, workloads: tuple[Workload, ...] = ALL) -> Iterator[Run]:
    """Run clients during the block; at its end stop them, then check and store their observations."""
    run = Run(nodes, topic, None, None, None)
    appends, transfers, groups = topics_of(topic)
    try:
        for name, workload in zip(topics_of(topic), ALL, strict=True):
            if workload in workloads:
                nodes.make_topic(name, PARTITIONS)
        if "append" in workloads:
            run.appends = AppendWorkload(nodes.bootstrap, PARTITIONS, racks=nodes.racks, topic=appends)
            run.appends.start()
            run.appends.wait_for_progress()
        if "transactions" in workloads:
            run.transfers = Transfers(nodes.bootstrap, transfers, PARTITIONS, run.operations)
            run.transfers.start()
            run.transfers.wait_for_progress()
        if "groups" in workloads:
            run.groups = GroupWorkload(nodes.bootstrap, PARTITIONS, directory, topic=groups, group=groups)
            run.groups.start()
            for commits in ("sync", "auto"):
                run.groups.add_member(commits)
            run.groups.wait_for_progress(_RESUME_S)
        title, roles = f"{running_test()} ({topic})", RoleWatch(nodes.bootstrap, run.topics[0])
        with drawn(title, list(nodes.nodes), nodes.voters, roles, run.recorded, run.noted):
            yield run
            run.finish()
    finally:
        run.abandon()
        run.operations.write(directory / "operations.jsonl")
