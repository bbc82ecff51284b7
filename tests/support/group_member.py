"""One member of a group, in a process of its own: reads, notes in a file what it was given, and commits.

    python -m tests.support.group_member BOOTSTRAP GROUP TOPIC FILE COMMITS [INSTANCE]

COMMITS is how: sync, async (with a commit before partitions are given up), or auto. SIGTERM ends it cleanly. Each line
of the file is one event; a line is written at once, so that it is there however the process ends.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from raftlog import Consumer, TopicPartition
from raftlog._consumer import RebalanceListener
from raftlog.errors import FencedError, RaftlogError

_POLL_S = 0.2
_WORK_S = 0.05


class Notes:
    """The file of events."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def write(self, event: str, **fields: Any) -> None:
        """Add a line, in one piece."""
        os.write(self._file, (json.dumps({"event": event, **fields}) + "\n").encode())


class Member(RebalanceListener):
    """Polls until it is told to stop."""

    def __init__(
        self,
        bootstrap: str,
        group: str,
        topic: str,
        notes: Notes,
        commits: str,
        instance: str,
        over: threading.Event,
    ) -> None:
        self._consumer = Consumer(
            bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=commits == "auto",
            auto_commit_interval_ms=200,
            group_instance_id=instance or None,
        )
        self._topic = topic
        self._notes = notes
        self._commits = commits
        self._done: dict[TopicPartition, int] = {}
        """Offsets that are processed and not committed yet; the outcome of background commits is not known yet."""
        self._unknown: dict[TopicPartition, int] = {}
        self._over = over

    def run(self) -> None:
        """Read until it is over."""
        with self._consumer as consumer:
            consumer.subscribe(self._topic, listener=self)
            while not self._over.is_set():
                asked_at = time.monotonic()
                try:
                    records = consumer.poll(_POLL_S)
                except RaftlogError as error:
                    self._notes.write("error", error=repr(error))
                    continue
                epoch = consumer.group_metadata().member_epoch
                given: dict[int, list[int]] = {}
                for record in records:
                    given.setdefault(record.partition, []).append(record.offset)
                if given:
                    time.sleep(_WORK_S)  # the records are processed
                self._notes.write("polled", asked_at=asked_at, done_at=time.monotonic(), given=given, epoch=epoch)
                for partition, offsets in given.items():
                    self._done[TopicPartition(self._topic, partition)] = offsets[-1] + 1
                if self._done and self._commits != "auto":
                    self._commit(at_once=self._commits == "sync")

    def _commit(self, *, at_once: bool) -> None:
        metadata = self._consumer.group_metadata()
        offsets = dict(self._done)
        fields = {
            "member": metadata.member_id,
            "epoch": metadata.member_epoch,
            "invoked_at": time.monotonic(),
            "offsets": {partition.partition: offset for partition, offset in offsets.items()},
        }

        def note(error: BaseException | None) -> None:
            if error is None:
                self._notes.write("committed", returned_at=time.monotonic(), **fields)
            else:
                self._notes.write("refused", error=repr(error), **fields)

        if not at_once:
            self._unknown |= offsets
            self._done.clear()
            try:
                self._consumer.commit_async(offsets, callback=lambda _, error: note(error))
            except FencedError as error:  # the session was over before it was sent
                note(error)
            return
        try:
            self._consumer.commit(offsets)
            self._done.clear()
            note(None)
        except FencedError as error:
            self._done.clear()
            note(error)
        except RaftlogError as error:  # once more with the next one
            note(error)

    def on_partitions_assigned(self, partitions: list[TopicPartition]) -> None:
        """They are this member's from here on."""
        metadata = self._consumer.group_metadata()
        fields = {"member": metadata.member_id, "instance": metadata.group_instance_id, "epoch": metadata.member_epoch}
        self._note("assigned", partitions, **fields)

    def on_partitions_revoked(self, partitions: list[TopicPartition]) -> None:
        """They are this member's up to here."""
        if self._commits == "async":
            self._done = {part: self._unknown[part] for part in partitions if part in self._unknown} | self._done
            if self._done:
                self._commit(at_once=True)
        self._drop("revoked", partitions)

    def on_partitions_lost(self, partitions: list[TopicPartition]) -> None:
        """They were this member's until an unknown time."""
        self._drop("lost", partitions)

    def _drop(self, event: str, partitions: list[TopicPartition]) -> None:
        for partition in partitions:
            self._done.pop(partition, None)
            self._unknown.pop(partition, None)
        self._note(event, partitions)

    def _note(self, event: str, partitions: list[TopicPartition], **fields: object) -> None:
        self._notes.write(event, at=time.monotonic(), partitions=[each.partition for each in partitions], **fields)


def main() -> None:
    """Read the arguments and run."""
    bootstrap, group, topic, path, commits = sys.argv[1:6]
    over = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: over.set())
    notes = Notes(path)  # from here on it ends cleanly
    member = Member(bootstrap, group, topic, notes, commits, sys.argv[6] if len(sys.argv) > 6 else "", over)
    try:
        member.run()
    except BaseException as error:  # the test shows it
        notes.write("broken", error=repr(error))
        raise
    notes.write("left", at=time.monotonic())


if __name__ == "__main__":
    main()
