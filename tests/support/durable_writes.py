"""Writers that number what they send to each partition, and readers that see whether all of it is there, once each.

Every record is sent until it is acknowledged, so in the end each partition has from each writer the numbers from 0 on,
in order and without a gap, and each lies where it was acknowledged. Nothing less is accepted, and nothing more.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from raftlog import Consumer, Delivery, Producer, TopicPartition
from raftlog.errors import RaftlogError

TOPIC: Final = "ledger"
RECORD: Final = np.dtype([("writer", ">u4"), ("number", ">u8"), ("rest", "V52")])
"""A value: its sender, and its number among the values that this sender sent to this partition."""
_REST: Final = b"\xa5" * 52
_STEP_S: Final = 0.05
"""A writer sends what is due every so often: shorter steps make smaller batches, which take more computing."""
_TRICKLE: Final = 100
"""Records that a writer sends a second once it has sent its share: then a slow machine, where faults take longer, has
no more to check in the end than a quick one."""
_MOST_OPEN: Final = 20_000
"""Records without an answer, above which a writer waits."""
_FLUSH_S: Final = 180.0
_READ_S: Final = 300.0


class Writer(threading.Thread):
    """An idempotent producer with acks=all that sends to all partitions in turn, `share` records at `rate` a second.

    It goes on until it is told that it is over, slowly.
    """

    def __init__(self, number: int, bootstrap: str, partitions: int, rate: int, share: int) -> None:
        super().__init__(name=f"writer-{number}", daemon=True)
        self.number = number
        self.over = threading.Event()
        self.acknowledged = 0
        self.offsets = [array("q") for _ in range(partitions)]
        """By partition and number; -1 without an answer."""
        self.sent_at = [array("d") for _ in range(partitions)]
        self.answered_at = [array("d") for _ in range(partitions)]
        self.errors: list[BaseException] = []
        self._rate, self._share = rate, share
        self._producer = Producer(bootstrap, acks="all", linger_ms=2, delivery_timeout_ms=600_000, retries=2**31 - 1)

    def run(self) -> None:
        sent = 0
        try:
            with self._producer as producer:
                while not self.over.wait(_STEP_S):
                    if sent - self.acknowledged < _MOST_OPEN:
                        rate = self._rate if sent < self._share else _TRICKLE
                        for _ in range(max(1, int(rate * _STEP_S))):
                            self._send(producer, sent % len(self.offsets))
                            sent += 1
                producer.flush(_FLUSH_S)
        except BaseException as error:  # the test shows it
            self.errors.append(error)

    def _send(self, producer: Producer, partition: int) -> None:
        offsets = self.offsets[partition]
        number = len(offsets)
        value = self.number.to_bytes(4, "big") + number.to_bytes(8, "big") + _REST
        offsets.append(-1)
        self.sent_at[partition].append(time.monotonic())

        def note(delivery: Delivery) -> None:
            try:
                offsets[number] = delivery.result(0).offset
            except RaftlogError as error:
                self.errors.append(error)
                return
            self.acknowledged += 1
            self.answered_at[partition].append(time.monotonic())

        producer.send(TOPIC, value, partition=partition).add_done_callback(note)


class DurableWrites:
    """`start`, break things, `stop`; then `check` what every replica has.

    The first `records` are sent at `rate` a second, by all writers together; then it goes on slowly.
    """

    def __init__(self, bootstrap: str, partitions: int, *, writers: int, rate: int, records: int) -> None:
        self._bootstrap = bootstrap
        self._partitions = range(partitions)
        share = -(-records // writers)
        self.writers = [Writer(number, bootstrap, partitions, rate // writers, share) for number in range(writers)]

    def start(self) -> None:
        """Begin."""
        for writer in self.writers:
            writer.start()

    def stop(self) -> None:
        """Send no more, and wait for every answer; each is an acknowledgement."""
        for writer in self.writers:
            writer.over.set()
        for writer in self.writers:
            writer.join(_FLUSH_S + 10)
            assert not writer.is_alive(), (
                f"{writer.name} still waits for acknowledgements {_FLUSH_S + 10:g} s after its last record"
            )
            assert not writer.errors, (
                f"every write of {writer.name} must be acknowledged, but some failed: {writer.errors[:3]}"
            )

    @property
    def acknowledged(self) -> int:
        """How many records were acknowledged so far."""
        return sum(writer.acknowledged for writer in self.writers)

    def last_answer_at(self, partition: int) -> float:
        """Return when something was acknowledged last in a partition."""
        return max((times[-1] for writer in self.writers if (times := writer.answered_at[partition])), default=0.0)

    def longest_gap_s(self, partition: int, since_s: float) -> float:
        """Return the longest time without an acknowledgement in a partition that ended after `since_s`."""
        late = [at for writer in self.writers for at in _later(writer.answered_at[partition], since_s - 5)]
        times = np.sort(np.array(late))
        gaps = np.diff(times)[times[1:] > since_s]
        return float(gaps.max()) if len(gaps) else 0.0

    def check(self, racks: Mapping[int, str]) -> int:
        """Read everything, at each replica by its rack, and return how many records there are.

        Raises:
            AssertionError: a record is not there, there twice, elsewhere, or not in order.
        """
        for rack in racks.values():
            for partition in self._partitions:
                acknowledged = {writer.number: writer.offsets[partition] for writer in self.writers}
                compare(acknowledged, *self._read(partition, rack), f"partition {partition}, rack {rack}")
        return sum(len(offsets) for writer in self.writers for offsets in writer.offsets)

    def _read(self, partition: int, rack: str) -> tuple[Any, Any]:
        wanted = sum(len(writer.offsets[partition]) for writer in self.writers)
        at = TopicPartition(TOPIC, partition)
        offsets, values, found = [], [], 0
        with Consumer(self._bootstrap, auto_offset_reset="earliest", client_rack=rack) as consumer:
            consumer.assign([at])
            deadline_s = time.monotonic() + _READ_S
            while (end := consumer.end_offsets([at])[at]) < wanted and time.monotonic() < deadline_s:
                time.sleep(_STEP_S)  # a new leader hears from the others what is committed
            assert end == wanted, f"{at} ends at offset {end} after {_READ_S:g} s, but {wanted} records were sent to it"
            while found < wanted:
                assert time.monotonic() < deadline_s, (
                    f"a consumer in rack {rack} has read {found} of {wanted} records of {at} after {_READ_S:g} s"
                )
                table = consumer.poll_arrow(0.5)
                found += table.num_rows
                offsets.append(table.column("offset").to_numpy())
                values += table.column("value").to_pylist()
        return np.concatenate(offsets), np.frombuffer(b"".join(values), RECORD)


def compare(acknowledged: Mapping[int, Sequence[int]], offsets: Any, values: Any, where: str) -> None:
    """Compare what was read of a partition with where each writer's records were acknowledged, by their numbers.

    Raises:
        AssertionError: they differ.
    """
    assert np.array_equal(offsets, np.arange(len(values))), (
        f"{where}: the offsets read must count up from 0 without a gap or a repetition"
    )
    for writer, expected in acknowledged.items():
        own = values["writer"] == writer
        numbers, sent = values["number"][own].astype(np.int64), len(expected)
        if not np.array_equal(numbers, np.arange(sent)):
            there, times = np.unique(numbers, return_counts=True)
            lost, doubled = np.setdiff1d(np.arange(sent), there), there[times > 1]
            raise AssertionError(
                f"{where}, writer {writer}: of {sent} records, {len(lost)} are lost {lost[:5]}, {len(doubled)} "
                f"are there twice {doubled[:5]}, and {int((np.diff(numbers) < 0).sum())} are out of order"
            )
        moved = np.flatnonzero(np.array(expected) != offsets[own])
        assert not len(moved), (
            f"{where}, writer {writer}: {len(moved)} records are not at the offset that was acknowledged"
        )
    strangers = int((~np.isin(values["writer"], list(acknowledged))).sum())
    assert not strangers, f"{where}: {strangers} records are there that no writer sent"


def _later(times: array[float], since_s: float) -> array[float]:
    """Return what is later of times that are almost in order."""
    at = len(times)
    while at > 0 and times[at - 1] > since_s:
        at -= 1
    return times[at:]
