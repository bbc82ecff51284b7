"""Malformed records are refused with a reason, and have no other effect."""

from __future__ import annotations

import pytest

from broker.coordinator.groups.group import Committed, Head, Pending
from broker.coordinator.groups.records import head_record, offset_record, pending_record
from raftlog.errors import CorruptRecordError
from raftlog.v1.group_records_pb2 import (
    AssignedPartitions,
    AssignmentValue,
    GroupRecordKey,
    GroupValue,
    OffsetKey,
    OffsetValue,
)
from tests.support.group_driver import GroupDriver

ID = b"i" * 16
OFFSET = GroupRecordKey(group_id="g", offset=OffsetKey(topic_id=ID))
HELD = AssignedPartitions(topic_id=ID, partitions=[1], since_epochs=[1])


def assignment(value: AssignmentValue) -> tuple[bytes, bytes]:
    return GroupRecordKey(group_id="g", assignment_of="m").SerializeToString(), value.SerializeToString()


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        (b"\xff\xff", b"", "is no key of a group's record"),
        (GroupRecordKey(group=True).SerializeToString(), b"", "names no group"),
        (GroupRecordKey(group_id="g").SerializeToString(), b"", "of no kind that this version knows"),
        (OFFSET.SerializeToString(), b"\xff", "offset of the group 'g'"),
        (OFFSET.SerializeToString(), OffsetValue(offset=-1).SerializeToString(), "offset -1 is below 0"),
        (
            GroupRecordKey(group_id="g", offset=OffsetKey(topic_id=b"short")).SerializeToString(),
            b"",
            "16 bytes, not 5",
        ),
        (
            GroupRecordKey(group_id="g", group=True).SerializeToString(),
            GroupValue(group_epoch=1, assignment_epoch=2).SerializeToString(),
            "assignment epoch 2 in group epoch 1",
        ),
        (*assignment(AssignmentValue(assigned=[HELD], pending_revocation=[HELD])), "at once"),
        (*assignment(AssignmentValue(assigned=[AssignedPartitions(topic_id=ID, partitions=[1])])), "with 0 epochs"),
    ],
)
def test_a_corrupt_record_is_refused_with_a_reason(key: bytes, value: bytes, reason: str) -> None:
    driver = GroupDriver()
    with pytest.raises(CorruptRecordError, match=reason):
        driver.core.replay(key, value)
    assert not driver.core.groups


def test_golden_bytes() -> None:
    assert offset_record("g", (ID, 3), Committed(5, -1, "m", 7, "t")) == (
        bytes.fromhex("0a016712140a10") + ID + bytes.fromhex("1003"),
        bytes.fromhex("080510ffffffffffffffffff011a016d20072a0174"),
    )
    assert head_record("g", Head(2, 1, "sticky", 9, {ID: 4}, ("a.*",))) == (
        bytes.fromhex("0a01671801"),
        bytes.fromhex("080210011a06737469636b7920092a140a10") + ID + bytes.fromhex("10043203612e2a"),
    )


def test_the_user_that_made_a_group_is_in_one_of_its_records_and_left_out_where_there_is_none() -> None:
    """The record of the group as a whole names it; where there is none, those of offsets do."""
    user = bytes.fromhex("06557365723a61")
    offset, head = Committed(5, -1, "m", 7, "t"), Head(2, 2, empty_since_ms=9)
    of_offset = offset_record("g", (ID, 3), offset, "User:a")
    assert of_offset[1] == (offset_record("g", (ID, 3), offset)[1] or b"") + b"\x3a" + user
    of_pending = pending_record("g", 7, (ID, 3), Pending(offset, 4), "User:a")
    assert of_pending[1] == (pending_record("g", 7, (ID, 3), Pending(offset, 4))[1] or b"") + b"\x3a" + user
    of_head = head_record("g", head, "User:a")
    assert of_head[1] == (head_record("g", head)[1] or b"") + b"\x42" + user
    for record in (of_offset, of_pending, of_head):
        driver = GroupDriver()
        driver.core.replay(*record)
        assert driver.core.groups["g"].user == "User:a"
        assert driver.core.made.counts == {"User:a": 1}
        driver.core.replay(record[0], None)
        assert not driver.core.made.counts
