"""A group at work on a cluster: a producer, members in processes of their own, an observer of what is committed."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from raftlog import Admin, Consumer, Delivery, Producer, TopicPartition
from raftlog.errors import RaftlogError
from tests.support.group_checker import History, Observation
from tests.support.group_notes import Noted, noted, read_events

TOPIC = "chaos"
GROUP = "workers"
_ROOT = Path(__file__).parents[2]
_SEND_PAUSE_S = 0.02
_OBSERVE_PAUSE_S = 0.1
_END_S = 90.0

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="member-starter")
"""A member dies with the thread that started it; this one lives until the interpreter ends."""


@dataclass
class MemberProcess:
    """One life of one member."""

    name: str
    process: subprocess.Popen[bytes]
    notes: Path
    output: Path
    commits: str
    instance: str
    killed: bool = False

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    def pause(self) -> None:
        """Freeze it."""
        os.kill(self.pid, signal.SIGSTOP)

    def resume(self) -> None:
        """Let it go on."""
        os.kill(self.pid, signal.SIGCONT)

    def kill(self) -> None:
        """End it without a word."""
        self.killed = True
        self.process.kill()
        self.process.wait(_END_S)

    def terminate(self) -> None:
        """Tell it to end, which it understands once it has begun to note anything."""
        until = time.monotonic() + _END_S
        while not self.notes.exists():
            assert self.process.poll() is None, (
                f"{self.name} ended before it noted anything: {self.output.read_text()[-2000:]}"
            )
            assert time.monotonic() < until, f"{self.name} has noted nothing within {_END_S:g} s"
            time.sleep(0.01)
        self.process.terminate()

    def stop(self) -> None:
        """End it cleanly: it leaves the group. Raises as `wait_ended`."""
        self.terminate()
        self.wait_ended()

    def wait_ended(self) -> None:
        """Wait until it has done what it was told.

        Raises:
            AssertionError: it does not end, or not cleanly.
        """
        try:
            code = self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(
                f"{self.name} did not end within {_END_S:g} s: {self.output.read_text()[-2000:]}"
            ) from None
        assert code == 0, f"{self.name} ended with exit code {code}: {self.output.read_text()[-2000:]}"


class _Sender(threading.Thread):
    """Sends numbered records to all partitions in turn."""

    def __init__(self, bootstrap: str, topic: str, partitions: int) -> None:
        super().__init__(name="sender", daemon=True)
        self._topic = topic
        self.over = threading.Event()
        self.broken: BaseException | None = None
        self._partitions = partitions
        self.sent_at: list[list[float]] = [[] for _ in range(partitions)]
        self.answered_at: list[list[float]] = [[] for _ in range(partitions)]
        self._producer = Producer(bootstrap, linger_ms=1)

    def run(self) -> None:
        try:
            with self._producer as producer:
                deliveries = []
                for number in itertools.count():
                    if self.over.is_set():
                        break
                    partition = number % self._partitions
                    self.sent_at[partition].append(time.monotonic())
                    deliveries.append(producer.send(self._topic, b"%d" % number, partition=partition))
                    deliveries[-1].add_done_callback(partial(self._note, partition))
                    time.sleep(_SEND_PAUSE_S)
                for delivery in deliveries:
                    delivery.result(_END_S)
        except BaseException as error:  # the test shows it
            self.broken = error

    def _note(self, partition: int, delivery: Delivery) -> None:
        if delivery.exception(0) is None:
            self.answered_at[partition].append(time.monotonic())


class _Observer(threading.Thread):
    """Asks again and again what is committed."""

    def __init__(self, bootstrap: str, topic: str, group: str) -> None:
        super().__init__(name="observer", daemon=True)
        self._topic, self._group = topic, group
        self.over = threading.Event()
        self.observations: list[Observation] = []
        self.errors: list[RaftlogError] = []
        self.broken: BaseException | None = None
        self._admin = Admin(bootstrap)

    def run(self) -> None:
        try:
            with self._admin:
                while not self.over.is_set():
                    self.observe()
                    self.over.wait(_OBSERVE_PAUSE_S)
        except BaseException as error:  # the test shows it
            self.broken = error

    def observe(self) -> None:
        """Ask once. Partitions without an answer are at 0 if others have one: nothing is committed for them."""
        asked_at = time.monotonic()
        try:
            offsets = self._admin.group_offsets(self._group, timeout=10)
        except RaftlogError as error:
            self.errors.append(error)
            return
        told_at = time.monotonic()
        known = {part.partition: found.offset for part, found in offsets.items() if part.topic == self._topic}
        known = {**dict.fromkeys({each.partition for each in self.observations}, 0), **known}
        self.observations += [Observation(partition, offset, asked_at, told_at) for partition, offset in known.items()]


class GroupWorkload:
    """`start`, add members, break things, `stop`; then `history`."""

    def __init__(
        self, bootstrap: str, partitions: int, directory: Path, *, topic: str = TOPIC, group: str = GROUP
    ) -> None:
        self.partitions = [TopicPartition(topic, partition) for partition in range(partitions)]
        self.members: list[MemberProcess] = []
        """The members that run."""
        self.lives: list[MemberProcess] = []
        """All that there were."""
        self.ends: dict[TopicPartition, int] = {}
        self._bootstrap = bootstrap
        self._directory = directory
        self._topic, self._group = topic, group
        self._sender = _Sender(bootstrap, topic, partitions)
        self._observer = _Observer(bootstrap, topic, group)
        self._reader = Consumer(bootstrap)

    def start(self) -> None:
        """Begin to send and to observe."""
        self._sender.start()
        self._observer.start()

    def add_member(self, commits: str = "sync", instance: str = "") -> MemberProcess:
        """Start a member; returns at once."""
        name = f"member-{len(self.lives)}"
        notes, output = self._directory / f"{name}.notes", self._directory / f"{name}.out"
        module = ["tests.support.group_member", self._bootstrap, self._group, self._topic, str(notes), commits]
        command = [sys.executable, "-m", "raftlog.testing.dependent_process", str(os.getpid()), *module]
        command += [instance] if instance else []
        with output.open("wb") as stream:
            process = _starter.submit(
                subprocess.Popen,
                command,
                cwd=_ROOT,
                stdout=stream,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONPATH": str(_ROOT)},
            ).result()
        member = MemberProcess(name, process, notes, output, commits, instance)
        self.members.append(member)
        self.lives.append(member)
        return member

    def replace(self, member: MemberProcess) -> MemberProcess:
        """Start another one in the place of a member that has ended."""
        self.members.remove(member)
        return self.add_member(member.commits, member.instance)

    @property
    def observations(self) -> list[Observation]:
        """The observations so far."""
        return list(self._observer.observations)

    @property
    def sends(self) -> list[tuple[list[float], list[float]]]:
        """By partition when records were sent, and when they were acknowledged."""
        return list(zip(self._sender.sent_at, self._sender.answered_at, strict=True))

    def ends_now(self) -> dict[TopicPartition, int]:
        """Return how many records there are."""
        return self._reader.end_offsets(self.partitions)

    def committed(self) -> dict[TopicPartition, int]:
        """Return what is committed, as the observer was told last; 0: nothing."""
        found = dict.fromkeys(self.partitions, 0)
        for each in self._observer.observations[-4 * len(self.partitions) :]:
            found[TopicPartition(self._topic, each.partition)] = each.offset
        return found

    def wait_for_progress(self, timeout_s: float = 30.0) -> float:
        """Return the seconds until all that is there now is committed: no partition is stuck.

        Raises:
            AssertionError: not in time.
        """
        started_at = time.monotonic()
        wanted = self.ends_now()
        while True:
            behind = {str(part): (at, wanted[part]) for part, at in self.committed().items() if at < wanted[part]}
            if not behind:
                return time.monotonic() - started_at
            for each in (self._sender, self._observer):
                if each.broken is not None:
                    raise each.broken
            assert time.monotonic() < started_at + timeout_s, (
                f"within {timeout_s:g} s not every partition was committed to its end, by partition (committed, "
                f"wanted): {behind}; {self.seen()}"
            )
            time.sleep(0.05)

    def seen(self) -> str:
        """Return a text on what members have noted last, for the message of a failed test."""
        lines = [
            f"{each.name}: {read_events(each.notes)[-2:]} {each.output.read_text()[-500:]}" for each in self.members
        ]
        return "\n".join([f"observer: {self._observer.errors[-1:]}", *lines])

    def stop(self, timeout_s: float = 30.0) -> None:
        """Send no more, wait until everything is committed, and end every member cleanly."""
        self._sender.over.set()
        self._sender.join(_END_S)
        assert not self._sender.is_alive(), f"the sender still waits for acknowledgements after {_END_S:g} s"
        if self._sender.broken is not None:
            raise self._sender.broken
        self.ends = self.ends_now()
        self.wait_for_progress(timeout_s)
        for member in self.members:
            member.stop()
        self._observer.over.set()
        self._observer.join(_END_S)
        self._reader.close()

    def abandon(self) -> None:
        """End everything, however it is."""
        for member in self.members:
            with contextlib.suppress(ProcessLookupError):
                member.kill()
        self._sender.over.set()
        self._observer.over.set()

    def notes(self) -> dict[str, Noted]:
        """Return what each member has noted, by its name."""
        return {life.name: noted(read_events(life.notes), life.name) for life in self.lives}

    def history(self) -> History:
        """Return everything that was noted."""
        found = self.notes().values()
        return History(
            {part.partition: end for part, end in self.ends.items()},
            [span for each in found for span in each.spans],
            [commit for each in found for commit in each.commits],
            list(self._observer.observations),
            [stray for each in found for stray in each.strays],
        )
