"""Where leaders are reached, which followers are let in, and how much may flow, by the metadata and the config."""

from __future__ import annotations

from dataclasses import replace

import pytest

from broker.config.config import BrokerConfig
from broker.server.replication_role import address_of, check_replica, throttle_rate
from raftlog.errors import BrokerUnavailable, RetriableError, StaleBrokerEpoch
from raftlog.v1.records_pb2 import ConfigResource
from raftmeta.image import MetadataImage
from raftmeta.topic_configs import FOLLOWER_THROTTLE_RATE, LEADER_THROTTLE_RATE
from replication.ports import Replica
from tests.support.metadata import accept, alter, broker_epoch, cluster


def with_address(image: MetadataImage, broker_id: int, host: str, port: int) -> MetadataImage:
    broker = replace(image.brokers[broker_id], inter_node_host=host, inter_node_port=port)
    return replace(image, brokers={**image.brokers, broker_id: broker})


def test_a_leader_is_where_it_says_unless_this_node_has_a_route() -> None:
    image = with_address(with_address(cluster(3), 1, "10.0.0.1", 9093), 2, "::1", 9094)
    assert address_of(image, {}, 1) == "10.0.0.1:9093"
    assert address_of(image, {}, 2) == "[::1]:9094"
    assert address_of(image, {1: ("127.0.0.1", 7)}, 1) == "127.0.0.1:7"


def test_the_address_of_a_stranger_or_of_one_that_has_none_is_not_known() -> None:
    image = with_address(cluster(1), 1, "", 0)
    assert address_of(image, {}, 1) is None
    assert address_of(image, {}, 9) is None


def test_a_follower_is_let_in_in_the_life_that_is_registered() -> None:
    image = cluster(2)
    epoch = broker_epoch(image, 2)
    check_replica(image, 1, Replica(2, epoch))
    with pytest.raises(StaleBrokerEpoch, match=f"registered anew with epoch {epoch}"):
        check_replica(image, 1, Replica(2, epoch - 1))


def test_one_whose_registration_has_not_come_here_yet_may_ask_again() -> None:
    image = cluster(2)
    for replica in (Replica(2, broker_epoch(image, 2) + 1), Replica(9, 5)):
        with pytest.raises(BrokerUnavailable, match="does not know yet") as caught:
            check_replica(image, 1, replica)
        assert isinstance(caught.value, RetriableError)


def test_throttles_come_from_the_file_and_may_be_altered() -> None:
    least: dict[str, object] = {"node.id": 1, "log.dirs": "/data"}
    config = BrokerConfig.from_values({**least, LEADER_THROTTLE_RATE: "1MiB"})
    image = cluster(2)
    assert throttle_rate(image, config, LEADER_THROTTLE_RATE) == 1 << 20
    assert throttle_rate(image, config, FOLLOWER_THROTTLE_RATE) is None
    altered, _ = accept(
        image, alter("1", {FOLLOWER_THROTTLE_RATE: "5000", LEADER_THROTTLE_RATE: "7000"}, type_=ConfigResource.BROKER)
    )
    assert throttle_rate(altered, config, LEADER_THROTTLE_RATE) == 7_000
    assert throttle_rate(altered, config, FOLLOWER_THROTTLE_RATE) == 5_000
