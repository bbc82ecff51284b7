"""Malformed records are refused with a reason, and have no other effect."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.coordinator.transactions.records import (
    parse_sink,
    parse_transaction,
    partition_messages,
    sink_record,
    stage_record,
    transaction_record,
)
from broker.coordinator.transactions.transaction import Fence, Former, SinkHead, Stage, State, Transaction
from raftlog.errors import CorruptRecordError
from raftlog.v1 import group_pb2, transaction_pb2
from raftlog.v1.transaction_records_pb2 import SinkValue, StageKey, StageValue, TransactionRecordKey, TransactionValue
from tests.support.transaction_driver import TransactionDriver, hard

ID = b"i" * 16
OPEN = transaction_pb2.TRANSACTION_ONGOING
EMPTY = transaction_pb2.TRANSACTION_EMPTY
PARTITION = group_pb2.TopicPartitions(topic_id=ID, partitions=[1])
X = TransactionRecordKey(transactional_id="x").SerializeToString()
S = TransactionRecordKey(sink_id="s").SerializeToString()
STAGE = TransactionRecordKey(stage=StageKey(sink_id="s", producer_id=7)).SerializeToString()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"\xff\xff", b"", "is no key of a transaction's record"),
        (b"", b"", "of no kind that this version knows"),
        (TransactionRecordKey(transactional_id="").SerializeToString(), b"", "names nothing"),
        (TransactionRecordKey(stage=StageKey(producer_id=1)).SerializeToString(), b"", "names nothing"),
        (X, b"\xff", "transactional id 'x'"),
        (X, b"", "0 is not a valid State"),
        (X, TransactionValue(state=OPEN, producer_id=-1).SerializeToString(), "no producer id -1"),
        (X, TransactionValue(state=OPEN, producer_epoch=32768).SerializeToString(), "no producer epoch 32768"),
        (X, TransactionValue(state=OPEN, client_epoch=-2).SerializeToString(), "no client epoch -2"),
        (X, TransactionValue(state=99).SerializeToString(), "99 is not a valid State"),  # type: ignore[arg-type] # on purpose
        (
            X,
            TransactionValue(state=OPEN, partitions=[group_pb2.TopicPartitions(topic_id=b"short")]).SerializeToString(),
            "16 bytes, not 5",
        ),
        (X, TransactionValue(state=EMPTY, partitions=[PARTITION]).SerializeToString(), "no partitions of none"),
        (S, b"\xff", "sink 's'"),
        (S, SinkValue(last_batch_id=-2).SerializeToString(), "no batch -2"),
        (STAGE, b"\xff", "stage 7 of the sink 's'"),
        (STAGE, StageValue(batch_id=-1).SerializeToString(), "no batch -1"),
        (STAGE, StageValue(producer_epoch=32767).SerializeToString(), "no producer epoch 32767"),
    ],
)
def test_a_corrupt_record_is_refused_with_a_reason(key: bytes, value: bytes, reason: str) -> None:
    driver = TransactionDriver()
    with pytest.raises(CorruptRecordError, match=reason):
        driver.core.replay(key, value)
    assert hard(driver.core) == ({}, {})


def test_golden_bytes() -> None:
    known = Transaction(
        producer_id=7,
        producer_epoch=3,
        state=State.PREPARE_ABORT,
        timeout_ms=60_000,
        updated_ms=9,
        started_ms=8,
        partitions=frozenset({(ID, 2), (ID, 1)}),
        group_ids=frozenset({"h", "g"}),
        client_epoch=2,
        timed_out=True,
    )
    assert transaction_record("x", known) == (
        bytes.fromhex("0a0178"),
        bytes.fromhex("080710031804" + "20e0d403" + "28083009" + "3a160a10")
        + ID
        + bytes.fromhex("1a020102" + "42016742016848025001"),
    )
    assert sink_record("s", SinkHead(5, "t", 9, frozenset({4, 3}))) == (
        bytes.fromhex("120173"),
        bytes.fromhex("08051201741809" + "22020304"),
    )
    fresh = Transaction(7, 0, State.EMPTY, 60_000, 9, former=Former(4, 3))
    assert transaction_record("x", fresh)[1] == bytes.fromhex(
        "08071801" + "20e0d403" + "3009" + "48ffffffffffffffffff01" + "5a0408041003"
    )
    assert parse_transaction("x", transaction_record("x", fresh)[1] or b"") == fresh
    assert sink_record("s", SinkHead(5, "t", 9, frozenset(), 1000))[1] == bytes.fromhex("08051201741809" + "28e807")
    fenced = SinkHead(2, "t", 9, fences=(Fence(3, "run"),))
    assert sink_record("s", fenced)[1] == bytes.fromhex("08021201741809" + "320708031203") + b"run"
    assert parse_sink("s", bytes.fromhex("08021201741809" + "320708031203") + b"run") == fenced
    assert transaction_record("x", replace(fresh, user="User:a"))[1] == bytes.fromhex(
        "08071801" + "20e0d403" + "3009" + "48ffffffffffffffffff01" + "5a0408041003" + "6a06557365723a61"
    )
    made = SinkHead(5, "t", 9, user="User:a")
    assert sink_record("s", made)[1] == bytes.fromhex("08051201741809" + "3a06557365723a61")
    assert parse_sink("s", bytes.fromhex("08051201741809" + "3a06557365723a61")) == made
    assert stage_record("s", 7, Stage(5, 8, 1000, "1.0", frozenset({(ID, 1)}), True)) == (
        bytes.fromhex("1a050a01731007"),
        bytes.fromhex("0805180820e8072a03312e30" + "32150a10") + ID + bytes.fromhex("1a0101" + "3801"),
    )


def test_a_tombstone_of_what_is_not_there_does_nothing() -> None:
    driver = TransactionDriver()
    for record in (transaction_record("x", None), sink_record("s", None), stage_record("s", 7, None)):
        driver.core.replay(*record)
    assert hard(driver.core) == ({}, {})


def test_partitions_are_told_by_topic() -> None:
    found = partition_messages([(ID, 2), (bytes(16), 0), (ID, 1)])
    assert [(topic.topic_id, list(topic.partitions)) for topic in found] == [(bytes(16), [0]), (ID, [1, 2])]
