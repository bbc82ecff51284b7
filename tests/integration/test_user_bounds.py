"""Bounds on what users make, on a real server with logins: a tenant with rights to a prefix, and others beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import confluent_kafka
import pytest

from raftlog import AclBinding, AclOperation, Admin, PatternType, Producer, ResourceType
from raftlog.errors import PolicyViolation
from raftlog.testing import Cluster
from tests.support.steady import STEADY

WAIT_S = 60.0
PASSWORD = "Sesame, open!"
TENANT, OTHER = "tenant", "other"
IDS = "max.transactional.ids.per.user"
CONFIG: dict[str, str | int] = {
    **STEADY,
    "authorizer": "acl",
    "super.users": "User:admin",
    "metrics.listener": "127.0.0.1:0",
    IDS: 3,
}


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One server; both users may use what begins with `t-`."""
    users = dict.fromkeys(("admin", TENANT, OTHER), PASSWORD)
    with Cluster(users=users, kafka=True, config=CONFIG) as made:
        with Admin(made.bootstrap, config=made.client_config) as admin:
            admin.create_topic("t-topic")
            admin.create_acls(
                [
                    AclBinding(f"User:{user}", operation, resource, "t-", PatternType.PREFIXED)
                    for user in (TENANT, OTHER)
                    for resource, operation in (
                        (ResourceType.TOPIC, AclOperation.READ),
                        (ResourceType.TOPIC, AclOperation.WRITE),
                        (ResourceType.GROUP, AclOperation.READ),
                        (ResourceType.TRANSACTIONAL_ID, AclOperation.WRITE),
                    )
                ]
            )
        yield made


def settings(cluster: Cluster, user: str) -> dict[str, Any]:
    return cluster.client_config_of(user, PASSWORD)


def metric(cluster: Cluster, name: str, limit: str) -> float:
    endpoint = json.loads((cluster.config_file(1).parent / "ready.json").read_bytes())["metrics"]
    with urlopen(f"http://{endpoint}/metrics", timeout=WAIT_S) as page:
        lines = page.read().decode().splitlines()
    values = dict(line.rsplit(" ", 1) for line in lines if line.startswith(f"raftlog_{name}"))
    return float(values[f'raftlog_{name}{{limit="{limit}"}}'])


def transact(cluster: Cluster, user: str, transactional_id: str) -> None:
    """Commit a transaction of one record."""
    with Producer(cluster.bootstrap, transactional_id=transactional_id, config=settings(cluster, user)) as producer:
        producer.init_transactions(timeout=WAIT_S)
        producer.begin_transaction()
        producer.send("t-topic", b"x")
        producer.commit_transaction(timeout=WAIT_S)


def kafka_error_of(cluster: Cluster, user: str, transactional_id: str) -> confluent_kafka.KafkaError | None:
    """Return what a Kafka client is told that takes a transactional id."""
    conf = {"bootstrap.servers": cluster.kafka_bootstrap, **settings(cluster, user)}
    conf |= {"sasl.mechanism": "SCRAM-SHA-512", "log_level": 0}
    producer = confluent_kafka.Producer({**conf, "transactional.id": transactional_id})
    try:
        producer.init_transactions(WAIT_S)
    except confluent_kafka.KafkaException as error:
        told = error.args[0]
        assert isinstance(told, confluent_kafka.KafkaError)
        return told
    return None


def test_a_tenant_makes_no_more_transactional_ids_than_it_may(cluster: Cluster) -> None:
    """They are coordinated in different partitions, and counted together; a restart forgets none."""
    for number in range(3):
        transact(cluster, TENANT, f"t-{number}")
    with pytest.raises(PolicyViolation, match=rf"User:{TENANT} has made 3 transactional ids.*{IDS}"):
        transact(cluster, TENANT, "t-3")
    told = kafka_error_of(cluster, TENANT, "t-4")
    assert told is not None
    assert told.code() == confluent_kafka.KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert told.fatal(), "the client must not try again"
    transact(cluster, TENANT, "t-0")
    assert kafka_error_of(cluster, TENANT, "t-1") is None
    transact(cluster, OTHER, "t-3")
    assert metric(cluster, "ids_of_one_user", IDS) == 3
    assert metric(cluster, "ids_refused_total", IDS) == 2

    cluster.kill(1)
    cluster.start(1)
    transact(cluster, TENANT, "t-2")
    with pytest.raises(PolicyViolation):
        transact(cluster, TENANT, "t-5")
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        listed = admin.list_transactions()
    assert sorted(each.transactional_id for each in listed) == ["t-0", "t-1", "t-2", "t-3"]
