"""A transaction and a staged batch, told by the coordinator's core: tests/golden/transaction_*.txt.

Run this file with `RAFTLOG_REGENERATE_GOLDEN=1 ./dev test` to rewrite the golden files, then review the diff.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from broker.coordinator.transactions.commands import PendingMarkers
from raftlog.errors import RaftlogError
from raftlog.v1 import transaction_pb2
from raftlog.v1.transaction_records_pb2 import SinkValue, StageValue, TransactionRecordKey, TransactionValue
from tests.support.transaction_driver import WALL_MS, Call, Producer, TransactionDriver

GOLDEN = Path(__file__).parents[4] / "golden"


def state_name(state: transaction_pb2.TransactionState.ValueType) -> str:
    return transaction_pb2.TransactionState.Name(state).removeprefix("TRANSACTION_")


def where(partitions: object, groups: object = ()) -> str:
    names = [f"t-{number}" for topic in partitions for number in topic.partitions]  # type: ignore[attr-defined] # messages
    return " ".join([*names, *(f"group {group}" for group in groups)])  # type: ignore[attr-defined] # strings


def record_line(key: bytes, value: bytes | None) -> str:
    """One record of __transaction_state, for people."""
    parsed = TransactionRecordKey.FromString(key)
    kind = parsed.WhichOneof("kind")
    if kind == "transactional_id":
        name = f"{parsed.transactional_id}:"
        if value is None:
            return f"{name} forgotten"
        known = TransactionValue.FromString(value)
        line = f"{name} {state_name(known.state)} {known.producer_id}/{known.producer_epoch}"
        if known.client_epoch >= 0:
            line += f", ended {known.client_epoch}{' by the coordinator' if known.timed_out else ''}"
        on = where(known.partitions, known.group_ids)
        return f"{line}, on {on}" if on else line
    if kind == "sink_id":
        name = f"sink {parsed.sink_id}:"
        if value is None:
            return f"{name} forgotten"
        sink = SinkValue.FromString(value)
        committing = " ".join(map(str, sink.committing)) or "nobody"
        return f"{name} last batch {sink.last_batch_id}, committing {committing}"
    name = f"stage {parsed.stage.producer_id} of {parsed.stage.sink_id}:"
    if value is None:
        return f"{name} gone"
    stage = StageValue.FromString(value)
    line = f"{name} batch {stage.batch_id}{', aborting' if stage.aborting else ''}"
    on = where(stage.partitions)
    return line + (f", on {on}" if on else "")


class Story:
    """The events, the written records, and the answers."""

    def __init__(self, title: str) -> None:
        self.driver = TransactionDriver()
        self.lines = [title, ""]
        self._written = 0
        self._calls: list[tuple[str, Call]] = []
        self._started_ms = self.driver.now_ms
        assert WALL_MS % 1000 == 0

    def call(self, name: str, call: Call) -> Call:
        self._calls.append((name, call))
        return call

    def tell(self, sentence: str, refused: RaftlogError | None = None) -> None:
        self.lines.append(f"{(self.driver.now_ms - self._started_ms) / 1000:7.3f} s  {sentence}")
        self.lines += [f"           writes {record_line(*record)}" for record in self.driver.log[self._written :]]
        self._written = len(self.driver.log)
        if refused is not None:
            self.lines.append(f"           -> {type(refused).__name__}: {refused}")
        for name, call in [each for each in self._calls if each[1].is_answered()]:
            self.lines.append(f"           -> {name}: {self._answer(call)}")
            self._calls.remove((name, call))
        self.lines += [f"           owed {self._markers(markers)}" for markers in self.driver.pending]
        self.lines.append("")

    def _answer(self, call: Call) -> str:
        (answer,) = call.got
        if isinstance(answer, RaftlogError):
            return f"{type(answer).__name__}: {answer}"
        return " ".join(str(answer).split()) or "done"

    def _markers(self, markers: PendingMarkers) -> str:
        to = [f"t-{number}" for _, number in sorted(markers.partitions)]
        to += [f"group {group}" for group in sorted(markers.group_ids)]
        what = "commit" if markers.commit else "abort"
        return f"{what} {markers.producer_id}/{markers.producer_epoch} to {' '.join(to)}"

    def refused(self, sentence: str, action: Callable[[], object]) -> None:
        with pytest.raises(RaftlogError) as caught:
            action()
        self.tell(sentence, caught.value)

    def text(self) -> str:
        return "\n".join(self.lines)


def a_transaction() -> str:
    story = Story("Records are written to __transaction_state; a producer is <producer id>/<epoch>.")
    driver = story.driver
    producer = driver.init("x")
    story.tell("A producer begins as x: a fresh producer id, epoch 0.")
    driver.add(producer, 0)
    story.tell("It is going to write to t-0: that is on record before the first record of the transaction.")
    driver.add(producer, 1, groups=["g"])
    story.tell("And to t-1, and it will commit offsets of the group g.")
    driver.wait(40)
    first = story.call("EndTransaction", driver.end(producer))
    story.tell("It commits. The record is the decision; markers carry the next epoch. The answer waits for them.")
    driver.restart()
    story.tell("The coordinator fails. The next one reads the decision, and owes the same markers.")
    again = story.call("EndTransaction, again", driver.end(producer))
    story.tell("The producer asks again.")
    assert first is not again
    driver.write_markers()
    story.tell("Every partition and the group have their markers: who waits is answered.")
    producer = driver.next(producer, again)
    driver.wait(10)
    story.tell("A moment later that is on record.")
    driver.add(producer, 0)
    story.tell("The next transaction has the next epoch.")
    story.call("EndTransaction of epoch 0, late", driver.end(Producer("x", producer.producer_id, 0)))
    story.tell("A copy of the first EndTransaction arrives: it belongs to an epoch that is over.")
    driver.wait(60_000)
    story.tell("The producer is silent for a minute. Its transaction is aborted.")
    driver.write_markers()
    driver.wait(10)
    story.tell("The markers are written.")
    story.call("EndTransaction, commit", driver.end(producer))
    story.tell("The producer is back and wants to commit.")
    call = story.call("EndTransaction, abort", driver.end(producer, commit=False))
    story.tell("It aborts what is aborted, and has an epoch again.")
    producer = driver.next(producer, call)
    driver.add(producer, 1)
    story.tell("And goes on.")
    story.refused(
        "Another process begins as x. It fences the first one, whose transaction goes.", lambda: driver.init("x")
    )
    story.refused("The first one knows nothing of that.", lambda: driver.add(producer, 0))
    driver.write_markers()
    driver.init("x")
    story.tell("Once the markers are written the new one gets an epoch that nobody has had.")
    return story.text()


def a_staged_batch() -> str:
    story = Story("A sink s that writes to the topic t. Every stage is a producer id; markers of stages carry epoch 1.")
    driver = story.driver
    first = driver.init_stage(0, 0, attempt="0.0")
    story.tell("Task 0 of batch 0 has something to write: it begins a stage.")
    slow = driver.init_stage(0, 1, attempt="1.0")
    second = driver.init_stage(0, 1, attempt="1.1")
    driver.add_to_stage(second, 0)
    story.tell("Task 1 is slow, and tried a second time; the second attempt writes to t-0, too.")
    call = story.call("CommitBatch", driver.commit(0, first, second))
    story.tell("The driver commits batch 0 with one stage of each task. One record decides on all three.")
    story.refused("The slow attempt wants to write to another partition.", lambda: driver.add_to_stage(slow, 2))
    driver.restart()
    again = story.call("CommitBatch, again", driver.commit(0, first, second))
    story.tell("The coordinator fails. The next one owes the same markers, and the driver asks again.")
    assert call is not again
    driver.write_markers()
    driver.wait(10)
    story.tell("The markers are written: the batch is there for everybody, and its stages are gone.")
    story.call("CommitBatch, once more", driver.commit(0, first, second))
    story.tell("Asked once more, it is the same commit still.")
    story.refused(
        "The driver fails, and another one replays the batch: there is nothing to write.",
        lambda: driver.init_stage(0, 0),
    )
    story.call("CommitBatch of others", driver.commit(0, 17))
    story.tell("Had it written all the same, it would hear that the batch is committed.")
    lost = driver.init_stage(1, 0, attempt="0.0", timeout_ms=10_000)
    story.tell("Batch 1: a stage that may stand for 10 s.")
    driver.wait(10_000)
    story.tell("Nobody names it.")
    story.call("CommitBatch", driver.commit(1, lost))
    story.tell("A commit that names it is refused, and nothing changes: the batch has to be written again.")
    driver.write_markers()
    driver.wait(10)
    story.tell("Its markers are written.")
    story.call("CommitBatch", driver.commit(1))
    story.tell("The batch is replayed, and has no records this time.")
    return story.text()


@pytest.mark.parametrize(
    ("name", "told"), [("transaction_life", a_transaction), ("transaction_staged_batch", a_staged_batch)]
)
def test_the_story_is_the_golden_one(name: str, told: Callable[[], str]) -> None:
    file = GOLDEN / f"{name}.txt"
    if os.environ.get("RAFTLOG_REGENERATE_GOLDEN"):
        file.write_text(told())
    assert told() == file.read_text()
