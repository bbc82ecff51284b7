"""Decisions on brokers, and what only brokers ask for."""

from __future__ import annotations

import pytest

from raftlog.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    FeatureUpdateFailed,
    InvalidRequestError,
    RaftlogError,
    StaleBrokerEpoch,
    UnsupportedVersion,
)
from raftlog.v1.records_pb2 import ConfigResource, MetadataCommand
from raftmeta.decide import CommandResult, brokers
from raftmeta.image import MetadataImage
from tests.support.metadata import (
    accept,
    allocate_producer_ids,
    alter,
    begin_shutdown,
    broker_epoch,
    claim,
    cluster,
    create_partitions,
    create_topic,
    delete_topic,
    down,
    fence,
    image_after,
    refusal,
    register,
    unfence,
    unregister,
    up,
    update_feature,
)

ONE_BROKER = cluster(1)


def test_a_registration_begins_fenced_with_its_offset_as_the_epoch() -> None:
    image, result = accept(ONE_BROKER, register(2), offset=20)
    assert image.brokers[2].fenced
    assert result.broker_epoch == image.brokers[2].broker_epoch == image.offset == 20
    image = up(image, 2)
    assert not image.brokers[2].fenced
    _, again = accept(down(image, 2), register(2, incarnation=2))
    assert again.broker_epoch > 20


def test_a_repeated_registration_changes_nothing_and_gives_the_same_epoch() -> None:
    image = cluster(2)
    again, result = accept(image, register(2))
    assert again is image
    assert result == CommandResult(image.offset, broker_epoch=broker_epoch(image, 2))


def test_a_new_address_of_the_same_process_keeps_its_state() -> None:
    image = cluster(1, create_topic("a", 1))
    moved, result = accept(image, register(port=9999))
    assert moved.brokers[1].port == 9999
    assert not moved.brokers[1].fenced
    assert result.broker_epoch == broker_epoch(image, 1)


def test_another_process_with_the_id_of_a_live_one_is_refused() -> None:
    error = refusal(ONE_BROKER, register(1, incarnation=2, lock=7))
    assert isinstance(error, DuplicateBrokerRegistration)
    assert "broker 1 is running already, at 127.0.0.1:9092" in str(error)
    assert accept(down(ONE_BROKER, 1), register(1, incarnation=2, lock=7))


@pytest.mark.parametrize("directory", [None, 7])
def test_a_process_with_the_same_lock_is_the_successor(directory: int | None) -> None:
    """Whoever had that lock is dead: no session has to end first."""
    image, _ = accept(ONE_BROKER, register(1, incarnation=2, directory=directory))
    assert image.brokers[1].fenced


def test_without_a_lock_there_is_no_proof() -> None:
    command = register(2)
    command.register_broker.lock_identity = b""
    image = up(accept(ONE_BROKER, command)[0], 2)
    command = MetadataCommand.FromString(command.SerializeToString())
    command.register_broker.incarnation_id = bytes(16)
    assert isinstance(refusal(image, command), DuplicateBrokerRegistration)


@pytest.mark.parametrize(
    ("previous_epoch", "directory", "unclean"), [(0, None, False), (-1, None, True), (None, None, True), (0, 7, True)]
)
def test_a_stop_is_clean_with_the_mark_of_the_last_epoch_on_the_same_disk(
    previous_epoch: int | None, directory: int | None, unclean: bool
) -> None:
    image = down(ONE_BROKER, 1)
    previous = None if previous_epoch is None else broker_epoch(image, 1) + previous_epoch
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=previous, directory=directory))
    assert image.brokers[1].unclean == unclean


def test_a_clean_stop_stays_clean_when_the_machine_is_booted_meanwhile() -> None:
    """The clean mark and the directory are the same, the lock is of another kernel."""
    image = down(ONE_BROKER, 1)
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=broker_epoch(image, 1), lock=7))
    assert not image.brokers[1].unclean


def test_a_clean_stop_does_not_undo_an_unclean_one() -> None:
    """The process that came back uncleanly was never let in, and stopped cleanly."""
    image, _ = accept(ONE_BROKER, register(1, incarnation=2))
    image, _ = accept(image, register(1, incarnation=3, previous_epoch=broker_epoch(image, 1)))
    assert image.brokers[1].unclean
    assert not up(image, 1).brokers[1].unclean


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (register(broker_id=-1), "broker id -1 is negative"),
        (register(port=0), "'127.0.0.1':0 is no address"),
        (register(port=65536), "is no address"),
    ],
)
def test_a_bad_registration_is_refused(command: MetadataCommand, words: str) -> None:
    assert words in str(refusal(ONE_BROKER, command))


@pytest.mark.parametrize("field", ["incarnation_id", "directory_id", "lock_identity"])
def test_ids_have_sixteen_bytes(field: str) -> None:
    command = register()
    setattr(command.register_broker, field, b"short")
    assert "has 16 bytes, this one has 5" in str(refusal(ONE_BROKER, command))


@pytest.mark.parametrize("make", [fence, unfence, begin_shutdown, allocate_producer_ids])
def test_what_names_a_broker_names_its_present_epoch(make: object) -> None:
    assert callable(make)
    assert isinstance(refusal(ONE_BROKER, make(1, 1)), StaleBrokerEpoch)
    assert isinstance(refusal(ONE_BROKER, make(2, 1)), BrokerIdNotRegistered)


def test_states_are_entered_once() -> None:
    image = ONE_BROKER
    epoch = broker_epoch(image, 1)
    assert accept(image, unfence(1, epoch))[0] is image
    image, _ = accept(image, begin_shutdown(1, epoch))
    assert image.brokers[1].in_controlled_shutdown
    assert accept(image, begin_shutdown(1, epoch))[0] is image
    image, _ = accept(image, fence(1, epoch))
    assert accept(image, fence(1, epoch))[0] is image
    image, _ = accept(image, register(1, incarnation=2, previous_epoch=epoch))
    assert not image.brokers[1].in_controlled_shutdown


def test_a_broker_is_forgotten_when_it_is_down_and_holds_nothing() -> None:
    image = cluster(2, create_topic("a", 1, 1, 2))
    image, _ = accept(image, alter("2", {"log.retention.ms": "1"}, type_=ConfigResource.BROKER))
    assert "broker 2 is running" in str(refusal(image, unregister(2)))
    image = down(image, 2)
    assert "still holds replicas of 1 partitions" in str(refusal(image, unregister(2)))
    assert isinstance(refusal(image, unregister(7)), BrokerIdNotRegistered)
    idle, _ = accept(down(up(accept(image, register(3))[0], 3), 3), unregister(3))
    assert sorted(idle.brokers) == [1, 2]


def test_an_unregistered_broker_takes_its_configs_with_it() -> None:
    image = down(cluster(2), 2)
    image, _ = accept(image, alter("2", {"log.retention.ms": "1"}, type_=ConfigResource.BROKER))
    image, _ = accept(image, unregister(2))
    assert image.configs == {}


# Producer ids


def test_blocks_of_producer_ids_never_overlap() -> None:
    """KIP-730."""
    image = ONE_BROKER
    blocks = []
    for _ in range(3):
        image, result = accept(image, allocate_producer_ids(1, broker_epoch(image, 1)))
        blocks.append((result.first_producer_id, result.producer_ids))
    assert blocks == [(0, 1000), (1000, 1000), (2000, 1000)]
    assert image.next_producer_id == 3000


# Features


def with_features(*ranges: tuple[int, int]) -> MetadataImage:
    """Return a cluster whose brokers know these levels of the feature x."""
    return image_after(claim(), *(register(i, features={"x": each}) for i, each in enumerate(ranges, 1)))


def test_a_feature_is_finalized_once_every_broker_knows_it() -> None:
    """KIP-584."""
    image, _ = accept(with_features((1, 3), (1, 2)), update_feature("x", 2))
    assert image.features == {"x": 2}
    error = refusal(image, update_feature("x", 3))
    assert isinstance(error, FeatureUpdateFailed)
    assert "broker 2 does not know x at level 3" in str(error)
    assert "cannot be lowered" in str(refusal(image, update_feature("x", 1)))
    assert accept(image, update_feature("x", 2))[0] is image
    assert accept(with_features((1, 3)), update_feature("x", 2, validate_only=True))[0].features == {}


@pytest.mark.parametrize("command", [update_feature("y", 1), update_feature("metadata.version", 0)])
def test_unknown_and_lower_levels_are_refused(command: MetadataCommand) -> None:
    assert isinstance(refusal(ONE_BROKER, command), FeatureUpdateFailed)
    assert isinstance(refusal(image_after(claim()), update_feature("y", 1)), FeatureUpdateFailed)


def test_a_broker_that_does_not_know_a_finalized_level_cannot_register() -> None:
    image, _ = accept(with_features((1, 3)), update_feature("x", 2))
    for command in (register(2), register(2, features={"x": (1, 1)}), register(2, features={"x": (3, 9)})):
        assert isinstance(refusal(image, command), UnsupportedVersion)
    assert accept(image, register(2, features={"x": (2, 9)}))


def test_a_broker_that_does_not_say_knows_the_first_metadata_version() -> None:
    image = image_after(claim(), register(1))  # founded by the first version
    for known in ({}, {"metadata.version": (1, 4)}):
        assert accept(image, register(2, features=known))
    error: RaftlogError = refusal(image, register(2, features={"metadata.version": (2, 4)}))
    assert isinstance(error, UnsupportedVersion)
    assert isinstance(error, InvalidRequestError)


def test_what_a_broker_says_of_itself_has_limits() -> None:
    features = {"metadata.version": (1, 2)} | {f"f{n}": (1, 1) for n in range(63)}
    image, _ = accept(ONE_BROKER, register(2, rack="r" * 255, features=features))
    assert image.brokers[2].rack == "r" * 255
    too_long = [register(2, rack="r" * 256), register(2), register(2), register(2, features={"f" * 256: (1, 1)})]
    too_long[1].register_broker.host = "h" * 1_000_000
    too_long[2].register_broker.inter_node_host = "h" * 256
    for command in too_long:
        refused = refusal(ONE_BROKER, command)
        assert isinstance(refused, InvalidRequestError)
        assert "up to 255 characters" in str(refused)
        assert len(str(refused)) < 200
    refused = refusal(ONE_BROKER, register(2, features={f"f{n}": (1, 1) for n in range(65)}))
    assert "65 features" in str(refused)


def test_so_many_brokers_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(brokers, "MAX_BROKERS", 3)
    image = cluster(3)
    assert "3 brokers are registered" in str(refusal(image, register(4)))
    accept(image, register(3, incarnation=3, port=9093))


@pytest.mark.parametrize(
    "command",
    [
        delete_topic("\x01" * 1_000_000),
        create_partitions("\x01" * 1_000_000, 3),
        update_feature("\x01" * 1_000_000, 3),
        alter("\x01" * 1_000_000, {"retention.ms": "1"}),
        delete_topic(topic_id=bytes(1_000_000)),
    ],
    ids=lambda command: command.WhichOneof("command"),
)
def test_a_refusal_does_not_repeat_a_name_beyond_all_measure(command: MetadataCommand) -> None:
    assert len(str(refusal(ONE_BROKER, command))) < 1_500
