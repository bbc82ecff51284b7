"""A broker of a running cluster is drained, started again, and undrained, while clients write."""

from __future__ import annotations

import contextlib
from functools import partial

import pytest

import raftlog
from raftlog.errors import ElectionNotNeeded, InvalidReplicationFactor, PreferredLeaderNotAvailable
from raftlog.testing import Cluster
from tests.support import patience
from tests.support.steady import PATIENT
from tests.support.up_to_date import heard_everywhere

WAIT_S = 120.0
TOPIC = "orders"
PARTITIONS = 6


eventually = partial(patience.until, within_s=WAIT_S, pause_s=0.05)


def led_by(admin: raftlog.Admin, broker_id: int) -> list[int]:
    return [part.partition for part in admin.describe_topic(TOPIC).partitions if part.leader == broker_id]


def all_led_and_in_sync(admin: raftlog.Admin) -> bool:
    return all(part.leader > 0 and len(part.isr) == 3 for part in admin.describe_topic(TOPIC).partitions)


def spread(admin: raftlog.Admin) -> bool:
    """Have the first replicas lead; return whether they do."""
    with contextlib.suppress(ElectionNotNeeded, PreferredLeaderNotAvailable):  # while one is not in sync
        admin.elect_leaders(TOPIC)
    return len(led_by(admin, 2)) == 2


def described(admin: raftlog.Admin, broker_id: int) -> tuple[bool, bool]:
    (found,) = (each for each in admin.describe_cluster().brokers if each.broker_id == broker_id)
    return found.cordoned, found.drained


def test_a_drained_broker_leads_nothing_through_restarts_and_elections_until_it_is_undrained() -> None:
    with Cluster(nodes=3, config=PATIENT) as cluster, raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(TOPIC, PARTITIONS, 3, {"min.insync.replicas": 2})
        heard_everywhere(cluster)
        eventually(lambda: spread(admin), "2 leads a third")
        with raftlog.Producer(cluster.bootstrap) as producer:
            sent = [producer.send(TOPIC, b"%d" % n, partition=n % PARTITIONS) for n in range(60)]
            admin.alter_broker(2, drained=True)
            sent += [producer.send(TOPIC, b"%d" % n, partition=n % PARTITIONS) for n in range(60, 120)]
            eventually(lambda: not led_by(admin, 2) and all_led_and_in_sync(admin), "others lead")
            with pytest.raises(PreferredLeaderNotAvailable, match="drained"):
                admin.elect_leaders(TOPIC, [1])
            with pytest.raises(InvalidReplicationFactor, match="not cordoned or drained"):
                admin.create_topic("wide", 1, 3)
            placed = admin.create_topic("narrow", 3, 2)
            assert placed is not None
            assert all(2 not in part.replicas for part in placed.partitions)
            sent += [producer.send(TOPIC, b"%d" % n, partition=n % PARTITIONS) for n in range(120, 180)]

            cluster.stop(2)
            eventually(lambda: not any(2 in part.isr for part in admin.describe_topic(TOPIC).partitions), "2 is gone")
            cluster.start(2)
            eventually(lambda: all_led_and_in_sync(admin), "2 has caught up")
            assert described(admin, 2) == (True, True)
            assert led_by(admin, 2) == []
            cluster.kill(1)
            eventually(lambda: led_by(admin, 3) == list(range(PARTITIONS)), "3 leads, and not 2")
            admin.alter_broker(1, drained=True, until_restart=True)
            assert described(admin, 1) == (True, True)
            cluster.start(1)
            eventually(lambda: all_led_and_in_sync(admin), "1 has caught up")
            eventually(lambda: described(admin, 1) == (False, False), "that was over with its restart")

            admin.alter_broker(2, drained=False)
            eventually(lambda: spread(admin) and all_led_and_in_sync(admin), "2 leads again")
            assert {delivery.result(WAIT_S).partition for delivery in sent} == set(range(PARTITIONS))
