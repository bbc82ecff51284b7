"""Replay: records build the same image one by one, all at once, and from a snapshot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from raftlog.errors import UnsupportedVersion
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.decide import decide
from raftmeta.image import MetadataImage
from raftmeta.replay import image_from_records, replay, replay_all
from tests.support.metadata import alter, claim, create_topic, image_after, register
from tests.support.metadata_histories import Step, live, lives, security_lives


@given(st.one_of(lives, security_lives))
def test_one_by_one_and_all_at_once_are_the_same(life: list[tuple[Step, int, int]]) -> None:
    for event in live(life):
        step = event.before
        for record in event.decision.records:
            step = replay(step, record, event.offset)
        assert step == event.after


def test_the_bytes_of_a_snapshot_do_not_depend_on_the_order_of_events() -> None:
    first = image_after(
        claim(), register(1), create_topic("a", 1), create_topic("b", 2), alter("b", {"segment.ms": "1"})
    )
    second = image_after(claim(), register(1), create_topic("b", 2, configs={"segment.ms": "1"}), create_topic("a", 1))
    serialized = [
        [record.SerializeToString(deterministic=True) for record in image.to_records()] for image in (first, second)
    ]
    assert serialized[0] == serialized[1]


def test_an_old_image_does_not_change() -> None:
    old = image_after(claim(), register(), create_topic("a", 1, 2, configs={"segment.ms": "1"}))
    copy = image_from_records(old.to_records(), old.offset)
    for command in (create_topic("b", 2), alter("a", {"segment.ms": "2"}), register(incarnation=2), register(7)):
        replay_all(old, decide(old, command).records, old.offset + 1)
    assert old == copy


def test_a_record_of_an_unknown_kind_stops_the_load() -> None:
    unknown = MetadataRecord.FromString(b"\xfa\x07\x00")  # field 127, which a later version may have
    with pytest.raises(UnsupportedVersion, match="written by a newer version"):
        replay(MetadataImage(), unknown, 1)


def test_metadata_never_goes_back() -> None:
    image = image_after(claim(), register())
    with pytest.raises(AssertionError, match="metadata goes forward"):
        replay_all(image, (), image.offset - 1)
