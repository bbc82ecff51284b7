"""The two ends of a `Replicate` stream, each with a hostile other end; the follower's on a real log."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Final

from broker.log.config import LogConfig
from broker.log.partition_log import PartitionLog
from broker.partition.follower_term import Following
from raftlog.errors import RaftlogError
from raftlog.format import iter_headers, pack_stamp, parse_batch, wire
from raftlog.v1 import replication_pb2
from replication.follower_session import FollowerSession
from replication.ports import Replica
from replication.token_bucket import TokenBucket
from tests.fuzz.batches import any_batch, valid_batch
from tests.fuzz.choices import Choices, mutate
from tests.fuzz.messages import Known, message_of
from tests.fuzz.oracle import refusals, require
from tests.support.keyed_log import keyed_batch
from tests.support.log_driver import FakeClock, open_manager
from tests.support.memory_storage import MemoryStorage
from tests.support.replica_parts import CLUSTER, FOLLOWER, LEADER, TOPIC, Led, MemoryLog, Stream

_EPOCH: Final = 3
_CONFIG: Final = LogConfig(segment_bytes=600, index_interval_bytes=100)
_Done = Callable[[RaftlogError | None], None]


class _Flushing:
    """Everything is held at once."""

    def __init__(self, log: PartitionLog) -> None:
        self._log = log

    @property
    def durable_end_offset(self) -> int:
        return self._log.flushed_end_offset

    def appended(self) -> bool:
        self._log.flush()
        return True

    def catch_up(self) -> None:
        self._log.flush()


class _Cuts:
    """Logs are cut at once."""

    busy = False

    def run(self, cut: Callable[[], None], done: _Done) -> None:
        try:
            cut()
        except RaftlogError as error:
            done(error)
        else:
            done(None)


def follower_target(data: bytes) -> None:
    """A leader sends frames that it should not: the follower's log stays a log, in memory and on the disk."""
    choices = Choices(data)
    logging.disable(logging.CRITICAL)
    try:
        _follow(choices)
    finally:
        logging.disable(logging.NOTSET)


def _follow(choices: Choices) -> None:
    storage = MemoryStorage()
    manager = open_manager(storage, config=_CONFIG)
    log = manager.create("topic", TOPIC, 0)
    for number in range(choices.below(4)):
        log.append_stamped(_stamped(keyed_batch([(b"k", b"v")], 1_000), log.log_end_offset, number), now_ms=1_000)
    log.flush()
    following = Following(
        log,
        _Flushing(log),  # type: ignore[arg-type] # as much of it as is asked for
        _Cuts(),  # type: ignore[arg-type] # as above
        FakeClock(),
        leader_id=LEADER,
        leader_epoch=_EPOCH,
        wake_readers=lambda: None,
        on_damaged=lambda _log, _error: None,
    )
    session = FollowerSession(
        me=Replica(FOLLOWER, 20), leader_id=LEADER, cluster_id=CLUSTER, wake=lambda: None, throttle=TokenBucket()
    )
    session.follow(following)
    now_ms = 1_000.0
    session.connected(now_ms)
    for _ in range(1 + choices.below(6)):
        session.take_request(now_ms)
        message = b"".join(_messages(choices, log))
        with refusals():
            session.handle(wire.decode_replicate(message), now_ms)
        now_ms += choices.pick((1.0, 50.0, 5_000.0))
    _check_log(log)
    manager.close()
    again = open_manager(storage, config=_CONFIG).get(TOPIC, 0)
    require(again is not None, "the log that was written cannot be opened again")
    assert again is not None
    require(
        again.log_end_offset == log.log_end_offset,
        f"after a restart the log ends at {again.log_end_offset}, before it at {log.log_end_offset}",
    )


def _messages(choices: Choices, log: PartitionLog) -> Iterator[bytes]:
    known = Known(
        fields={
            "subscription_id": (1, 1, 1, 2, 0), "leader_epoch": (0, 1, 2, 3, -1), "code": (0, 0, 6, 2, 56),
            "end_offset": (log.log_end_offset, 0, 1, -1), "high_watermark": (log.log_end_offset, 0, 1 << 40, -1),
            "log_start_offset": (0, 1, log.log_end_offset, -1, 1 << 62),
        }
    )  # fmt: skip
    for _ in range(1 + choices.below(3)):
        head = replication_pb2.ReplicaFrame(subscription_id=choices.pick(known.fields["subscription_id"]))
        if choices.one_in(2):
            head = message_of(replication_pb2.ReplicaFrame, choices, known)
            head.ClearField("records")
        frame = wire.encode_replicate([wire.ReplicaFrame(head, b"".join(_records(choices, log)))])
        yield mutate(frame, choices) if choices.one_in(8) else frame


def _records(choices: Choices, log: PartitionLog) -> Iterator[bytes]:
    offset = log.log_end_offset
    for _ in range(choices.below(4)):
        kind = choices.below(8)
        batch = valid_batch(choices) if kind < 6 else any_batch(choices)
        epoch = choices.pick((_EPOCH, _EPOCH, 2, 4, -1))
        at = choices.integer() if choices.one_in(4) else offset - choices.pick((0, 0, 0, 0, 0, 0, 1, -1))
        if len(batch) >= 64 and at < 1 << 63:
            batch = _stamped(batch, at, epoch)
            if kind < 6:
                offset = parse_batch(batch).next_offset
        yield batch


def _stamped(batch: bytes, base_offset: int, leader_epoch: int) -> bytes:
    stamp = pack_stamp(base_offset, int.from_bytes(batch[8:12], "little"), leader_epoch)
    return stamp + batch[len(stamp) :]


def _check_log(log: PartitionLog) -> None:
    require(0 <= log.log_start_offset <= log.log_end_offset < 1 << 63, f"the log has impossible bounds: {log!r}")
    require(
        log.high_watermark <= log.log_end_offset,
        f"the high watermark {log.high_watermark} is behind the end of {log!r}",
    )
    offset, expected = log.log_start_offset, None
    while offset < log.log_end_offset:
        result = log.read(offset, 300, log.log_end_offset, blocking=True)
        require(result is not None and result.records, f"there are no records at offset {offset} of {log!r}")
        assert result is not None
        for position, _ in iter_headers(result.records):
            header = parse_batch(result.records, position)
            require(
                expected in (None, header.base_offset),
                f"a batch at offset {header.base_offset} follows where the next must have offset {expected}",
            )
            require(
                0 <= header.leader_epoch <= _EPOCH,
                f"the log has a batch of epoch {header.leader_epoch}, which the leader does not have",
            )
            expected = header.next_offset
        offset = result.next_offset


def leader_target(data: bytes) -> None:
    """A follower asks for what it should not: a stream ends with a reason, or goes on within its bounds."""
    choices = Choices(data)
    logging.disable(logging.CRITICAL)
    try:
        led = {number: Led(MemoryLog([1] * (3 + number))) for number in range(2)}
        stream = Stream(led)
        known = Known(
            fields={
                "cluster_id": (CLUSTER,), "broker_id": (FOLLOWER,), "broker_epoch": (20, 21), "leader_id": (LEADER,),
                "topic_id": (TOPIC,), "partition": (0, 1), "leader_epoch": (1, 0, 2), "fetch_offset": (3, 0, 2, 4),
                "last_fetched_epoch": (1, -1, 0), "durable_end_offset": (3, 0, 2), "subscription_id": (1, 2, 3, 4, 0),
                "close": (1, 2), "max_frame_bytes": (0, 1, 1 << 20), "damaged_offset": (0, 1),
                "live_credit_bytes": (1 << 20, 1, 0, -1), "catch_up_credit_bytes": (1 << 20,),
                "throttled_credit_bytes": (1 << 10,),
            },
            blobs=(TOPIC,),
        )  # fmt: skip
        with refusals():
            for number in range(1 + choices.below(6)):
                request = message_of(replication_pb2.ReplicateRequest, choices, known)
                if number == 0 or choices.byte() % 8:
                    request.ClearField("hello")
                if number == 0:
                    hello = request.hello
                    hello.cluster_id, hello.broker_id, hello.broker_epoch, hello.leader_id = (
                        CLUSTER,
                        FOLLOWER,
                        20,
                        LEADER,
                    )
                stream.leader.handle(request, stream.now_ms)
                frames = stream.leader.take_frames(stream.now_ms)
                require(len(wire.encode_replicate(frames)) < 4 << 20, "a message to a follower is 4 MiB long or longer")
                if stream.later:
                    stream.read_one()
                stream.now_ms += 10
        stream.leader.close()
        for partition in led.values():
            require(
                partition.high_watermark <= partition.log_end_offset,
                f"the high watermark {partition.high_watermark} is behind the log end {partition.log_end_offset}",
            )
            require(not partition.open_by, "a stream is still known after its end")
    finally:
        logging.disable(logging.NOTSET)
