"""A Ctrl-C, or whatever else comes out of a signal handler, in the midst of a poll: nothing is skipped by it."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from types import FrameType
from typing import Any

import pyarrow as pa
import pytest

import raftlog._core.fetched
from raftlog import Consumer, TopicPartition
from raftlog.format import Columns, decode_batch, encode_batch
from tests.support.fake_broker import FakeCluster
from tests.support.fake_members import FakeMembers

RECORDS, EACH = 4000, 4
FAST: dict[str, Any] = {"auto_offset_reset": "earliest", "retry_backoff_ms": 1, "retry_backoff_max_ms": 5}
ZERO = TopicPartition("t", 0)
PACKAGE = os.path.dirname(raftlog.__file__) + os.sep


class Interrupt:
    """Raises KeyboardInterrupt in this thread at the nth place where one can come: a call, or after one into C."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith(PACKAGE):
            self.left -= 1
            if self.left < 0:
                sys.setprofile(None)
                raise KeyboardInterrupt

    def during(self, work: Callable[[], list[int]]) -> list[int] | None:
        """Return what `work` does, None when it came to nothing."""
        sys.setprofile(self)
        try:
            return work()
        except KeyboardInterrupt:
            return None
        finally:
            sys.setprofile(None)


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster(nodes=1) as cluster:
        cluster.create_topic("t")
        for start in range(0, RECORDS, EACH):
            values = [b"%d" % number for number in range(start, start + EACH)]
            cluster.append("t", encode_batch(Columns(pa.array(values, pa.binary())), 1000))
        cluster.groups.add("g", 1)
        cluster.groups.members = FakeMembers(cluster, "g")
        yield cluster


def polled(consumer: Consumer) -> list[int]:
    return [record.offset for record in consumer.poll(30, max_records=6)]


def yielded(consumer: Consumer) -> list[int]:
    return [next(consumer).offset]


def tabled(consumer: Consumer) -> list[int]:
    offsets: list[int] = consumer.poll_arrow(30, max_records=6)["offset"].to_pylist()
    return offsets


@pytest.mark.parametrize("read", [polled, yielded, tabled])
@pytest.mark.parametrize("group_id", ["g", None])
def test_wherever_it_comes(cluster: FakeCluster, group_id: str | None, read: Callable[[Consumer], list[int]]) -> None:
    with Consumer(cluster.bootstrap, group_id, max_poll_records=6, **FAST) as consumer:
        consumer.subscribe("t")
        found: list[int] = []
        place = interrupted = 0
        while place < 40 or interrupted:
            interrupted = 0
            for _ in range(2):  # from what is there, and with something to fetch
                offsets = Interrupt(place).during(lambda: read(consumer))
                interrupted += offsets is None
                if group_id is not None:
                    group = consumer._group
                    assert group is not None
                    for part, done in group.progress.done().items():
                        assert part == ZERO
                        assert done.offset <= len(found), "what nobody has come back from is not done"
                found += offsets or []
                assert found == list(range(len(found))), f"interrupted at {place}"
            place += 1
        while len(found) < 30:
            found += read(consumer)
        assert found == list(range(len(found)))


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, SystemExit])
def test_inside_the_decoder(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch, error: type[BaseException]) -> None:
    decode, countdown = decode_batch, [5]

    def failing(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise error("once")
        return decode(*arguments, **options)

    monkeypatch.setattr(raftlog._core.fetched, "decode_batch", failing)
    with Consumer(cluster.bootstrap, "g", **FAST) as consumer:
        consumer.subscribe("t")
        with pytest.raises(error, match="once"):
            consumer.poll(30, max_records=2000)
        offsets = read_all(consumer)
        assert offsets == list(range(RECORDS))
    assert committed(cluster) == RECORDS


def test_a_close_right_after_it_commits_what_was_done_and_no_more(
    cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumer = Consumer(cluster.bootstrap, "g", **FAST)
    consumer.subscribe("t")
    assert polled(consumer) == list(range(6))
    decode, countdown = decode_batch, [3]

    def failing(*arguments: Any, **options: Any) -> Any:
        countdown[0] -= 1
        if countdown[0] == 0:
            raise KeyboardInterrupt
        return decode(*arguments, **options)

    with pytest.raises(KeyboardInterrupt), consumer:
        monkeypatch.setattr(raftlog._core.fetched, "decode_batch", failing)
        consumer.poll(30)
    assert committed(cluster) == 6


def test_a_table_that_has_no_room(cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    with Consumer(cluster.bootstrap, **FAST) as consumer:
        consumer.subscribe("t")
        with monkeypatch.context() as patched:

            def failing(rows: Iterable[object], engine: object) -> object:
                raise MemoryError("no room")

            patched.setattr("raftlog._consumer.table_of", failing)
            with pytest.raises(MemoryError):
                consumer.poll_arrow(30)
        assert read_all(consumer) == list(range(RECORDS))


def read_all(consumer: Consumer) -> list[int]:
    found: list[int] = []
    deadline = time.monotonic() + 30
    while len(found) < RECORDS and time.monotonic() < deadline:
        found += [record.offset for record in consumer.poll(0.5)]
    return found


def committed(cluster: FakeCluster) -> int | None:
    found = cluster.call(lambda: cluster.groups.groups["g"].offsets.get(ZERO))
    return None if found is None else found.offset
