"""Producer ids that are bound to their owners, and how the cluster comes to its secret."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from raftlog.errors import InvalidRequestError
from raftlog.v1.records_pb2 import MetadataCommand
from raftmeta.decide import PRODUCER_IDS_PER_BLOCK, CommandResult, decide
from raftmeta.features import METADATA_VERSION, PRODUCER_OWNERS_LEVEL
from raftmeta.image import MetadataImage
from raftmeta.producer_ids import MAX_NUMBER, TAG_BITS, ProducerIdKey, ProducerOwner
from raftmeta.replay import image_from_records, replay_all
from tests.support.metadata import allocate_producer_ids, claim, image_after, register, update_feature

KEY = ProducerIdKey(b"k" * 32, 10)
owners = st.builds(ProducerOwner, st.sampled_from(["principal", "transactional id", "sink"]), st.text())


@settings(derandomize=True)
@given(st.integers(10, MAX_NUMBER), owners, owners)
def test_an_id_is_its_owners_alone(number: int, owner: ProducerOwner, other: ProducerOwner) -> None:
    producer_id = KEY.bind(number, owner)
    assert 0 <= producer_id < 1 << 63
    assert producer_id >> TAG_BITS == number
    assert KEY.is_bound(producer_id)
    assert KEY.owns(owner, producer_id)
    if other != owner:
        assert not KEY.owns(other, producer_id)
    assert not ProducerIdKey(b"l" * 32, 10).owns(owner, producer_id)


def test_the_layout_of_an_id() -> None:
    tag = hmac.digest(b"k" * 32, b"77 sink:s", hashlib.sha256)[:3]
    assert KEY.bind(77, ProducerOwner.sink("s")) == 77 << 24 | int.from_bytes(tag, "big")


@pytest.mark.parametrize("producer_id", [0, 9])
def test_lower_numbers_are_ids_from_before(producer_id: int) -> None:
    assert not KEY.is_bound(producer_id)
    assert KEY.is_bound(KEY.bind(10, ProducerOwner.principal("User:a")))


# The secret


def allocated(image: MetadataImage, secret: bytes) -> tuple[MetadataImage, CommandResult]:
    command = allocate_producer_ids(1, image.brokers[1].broker_epoch)
    command.allocate_producer_ids.new_secret = secret
    decision = decide(image, command)
    assert isinstance(decision.outcome, CommandResult), decision.outcome
    return replay_all(image, decision.records, image.offset + 1), decision.outcome


def test_the_first_block_makes_a_secret_the_clusters() -> None:
    image = image_after(claim(newest=True), register())
    image, block = allocated(image, b"1" * 32)
    assert block.first_producer_id == 0
    assert image.producer_id_key == ProducerIdKey(b"1" * 32, 0)
    image, block = allocated(image, b"2" * 32)
    assert block.first_producer_id == PRODUCER_IDS_PER_BLOCK
    assert image.producer_id_key == ProducerIdKey(b"1" * 32, 0), "the secret must stay the first one"
    assert image_from_records(image.to_records(), image.offset) == image


@pytest.mark.parametrize("secret", [b"", b"short", bytes(33)])
def test_a_secret_has_32_bytes(secret: bytes) -> None:
    image = image_after(claim(newest=True), register())
    command: MetadataCommand = allocate_producer_ids(1, image.brokers[1].broker_epoch)
    command.allocate_producer_ids.new_secret = secret
    assert isinstance(decide(image, command).outcome, InvalidRequestError)


def test_below_the_metadata_version_numbers_are_ids_and_they_stay_so() -> None:
    image = image_after(claim(), register())
    image, _ = allocated(image, b"1" * 32)
    assert image.producer_id_key is None
    decision = decide(image, update_feature(METADATA_VERSION, PRODUCER_OWNERS_LEVEL))
    image = replay_all(image, decision.records, image.offset + 1)
    image, block = allocated(image, b"2" * 32)
    assert image.producer_id_key == ProducerIdKey(b"2" * 32, PRODUCER_IDS_PER_BLOCK)
    assert block.first_producer_id == PRODUCER_IDS_PER_BLOCK
