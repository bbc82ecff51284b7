"""A rebalance, told by the coordinator's core: tests/golden/group_rebalance.txt.

Run this file with `RAFTLOG_REGENERATE_GOLDEN=1 ./dev test` to rewrite the golden file, then review the diff.
"""

from __future__ import annotations

import os
from pathlib import Path

from broker.coordinator.groups.group import Assignment
from broker.coordinator.groups.records import by_topic
from raftlog.errors import RaftlogError
from raftlog.v1 import group_pb2
from tests.support.group_driver import GroupDriver, Stream, topic_id

FILE = Path(__file__).parents[4] / "golden" / "group_rebalance.txt"
T = topic_id("t")


class Story:
    """What happens, what the members are told of it, and what the coordinator knows then."""

    def __init__(self) -> None:
        self.driver = GroupDriver({"t": 4})
        self.lines = ["Topic t has 4 partitions. Sessions end after 15 s, a partition is let go within 60 s.", ""]
        self.streams: list[Stream] = []
        self._told: dict[int, int] = {}

    def join(self, name: str) -> Stream:
        stream = self.driver.join(name, "t")
        self.streams.append(stream)
        return stream

    def tell(self, sentence: str) -> None:
        self.lines.append(sentence)
        for stream in self.streams:
            for message in stream.got[self._told.get(id(stream), 0) :]:
                if line := self._message(message):
                    self.lines.append(f"           -> {stream.name}: {line}")
            self._told[id(stream)] = len(stream.got)
        group = self.driver.core.groups["g"]
        shown = self.driver.described()
        state = group_pb2.GroupState.Name(shown.state).lower()
        self.lines.append(
            f"{self.driver.now_ms / 1000:7.1f} s  {state}, group epoch {shown.group_epoch}, "
            f"assignment epoch {shown.assignment_epoch}"
        )
        self.lines += [f"           {name}: {self._member(group.assignments[name])}" for name in sorted(group.members)]
        self.lines.append("")

    def _message(self, message: object) -> str:
        if isinstance(message, RaftlogError):
            return f"{type(message).__name__}: {message}"
        if isinstance(message, group_pb2.GroupResponse) and message.HasField("assignment"):
            told = message.assignment
            numbers = [str(number) for topic in told.topics for number in topic.partitions]
            note = f" ({told.note})" if told.note else ""
            return f"epoch {told.member_epoch}, read {' '.join(numbers) or 'nothing'}{note}"
        return ""

    def _member(self, assignment: Assignment) -> str:
        has = by_topic(assignment.assigned).get(T, [])
        text = " ".join(f"{number}(since {assignment.assigned[T, number]})" for number in has)
        pending = " ".join(map(str, by_topic(assignment.pending_revocation).get(T, [])))
        return f"epoch {assignment.member_epoch}, has {text or 'nothing'}" + (
            f", has to let {pending} go" if pending else ""
        )


def told() -> str:
    story = Story()
    driver = story.driver
    a = story.join("a")
    story.tell("a joins. It is given everything.")
    driver.follow(a)
    driver.wait(1000)
    b = story.join("b")
    story.tell("b joins. a is told to let half of it go; until it has, b waits, and a stays in its epoch.")
    driver.wait(500)
    driver.follow(a)
    story.tell("a has stopped, committed, and says what it reads now. It enters the new epoch, and b gets its part.")
    driver.follow(b)
    driver.disconnect(b)
    driver.wait(5000)
    driver.heartbeat(a, 2)
    story.tell("b's stream breaks. Nothing happens: it may be back.")
    driver.wait(8000)
    driver.heartbeat(a, 2)
    driver.wait(2000)
    story.tell("15 s after b was heard of it is given up. a goes on with what it has, and gets the rest.")
    driver.follow(a)
    late = story.join("b")
    story.tell("b comes back after all, as a new member. a is told to let half of it go.")
    driver.wait(100)
    driver.restart()
    story.tell(
        "The coordinator fails. Another broker has read its records: both have all their session's time to come back."
    )
    owned = [(T, number) for number in range(4)]
    back = driver.join("a", "t", epoch=a.assignment.member_epoch, owned=owned)
    story.streams.append(back)
    story.tell("a is back on a new stream, and says that it reads everything still.")
    driver.follow(back)
    story.tell("It lets go of what is not its own any more.")
    driver.wait(15_000)
    assert late.name == "b"
    story.tell("Nobody comes back any more: the group is empty, and its offsets begin to age.")
    return "\n".join(story.lines)


def test_the_story_is_the_golden_one() -> None:
    if os.environ.get("RAFTLOG_REGENERATE_GOLDEN"):
        FILE.write_text(told())
    assert told() == FILE.read_text()
