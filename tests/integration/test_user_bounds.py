"""Bounds on what users make, on a real server with logins: a tenant with rights to a prefix, and others beside it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.request import urlopen

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from raftlog import AclBinding, AclOperation, Admin, Consumer, PatternType, Producer, ResourceType, TopicPartition
from raftlog.errors import PolicyViolation
from raftlog.testing import Cluster
from tests.support.steady import STEADY

WAIT_S = 60.0
PASSWORD = "Sesame, open!"
TENANT, OTHER = "tenant", "other"
IDS, GROUPS = "max.transactional.ids.per.user", "max.groups.per.user"
PARTITIONS = "max.partitions.per.user"
CONFIG: dict[str, str | int] = {
    **STEADY,
    "authorizer": "acl",
    "super.users": "User:admin",
    "metrics.listener": "127.0.0.1:0",
    IDS: 3,
    GROUPS: 3,
    PARTITIONS: 20,
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
                        (ResourceType.TOPIC, AclOperation.CREATE),
                        (ResourceType.TOPIC, AclOperation.DELETE),
                        (ResourceType.GROUP, AclOperation.READ),
                        (ResourceType.TRANSACTIONAL_ID, AclOperation.WRITE),
                    )
                ]
            )
        yield made


def settings(cluster: Cluster, user: str) -> dict[str, Any]:
    return cluster.client_config_of(user, PASSWORD)


def kafka_settings(cluster: Cluster, user: str) -> dict[str, Any]:
    mechanism = {"sasl.mechanism": "SCRAM-SHA-512", "log_level": 0}
    return {"bootstrap.servers": cluster.kafka_bootstrap, **settings(cluster, user), **mechanism}


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
    producer = confluent_kafka.Producer({**kafka_settings(cluster, user), "transactional.id": transactional_id})
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


def test_the_transactions_of_a_tenant_name_no_more_groups_than_they_may(cluster: Cluster) -> None:
    """A group keeps the end of each transaction that named it; the names of groups that never were count as well."""
    refused = metric(cluster, "ids_refused_total", GROUPS)
    offsets = {TopicPartition("t-topic", 0): 0}
    with Producer(cluster.bootstrap, transactional_id="t-0", config=settings(cluster, TENANT)) as producer:
        producer.init_transactions(timeout=WAIT_S)
        for number in (0, 1, 1, 2, 0):
            producer.begin_transaction()
            producer.send_offsets_to_transaction(offsets, f"t-named-{number}", timeout=WAIT_S)
            producer.abort_transaction(timeout=WAIT_S)
        producer.begin_transaction()
        with pytest.raises(PolicyViolation, match=rf"User:{TENANT} have named 3 groups.*{GROUPS}"):
            producer.send_offsets_to_transaction(offsets, "t-named-3", timeout=WAIT_S)
        producer.abort_transaction(timeout=WAIT_S)
    assert metric(cluster, "ids_refused_total", GROUPS) == refused + 1

    kafka = confluent_kafka.Producer({**kafka_settings(cluster, TENANT), "transactional.id": "t-0"})
    consumer = confluent_kafka.Consumer({**kafka_settings(cluster, TENANT), "group.id": "t-named-3"})
    try:
        kafka.init_transactions(WAIT_S)
        kafka.begin_transaction()
        with pytest.raises(confluent_kafka.KafkaException) as raised:
            kafka.send_offsets_to_transaction(
                [confluent_kafka.TopicPartition("t-topic", 0, 0)], consumer.consumer_group_metadata(), WAIT_S
            )
        told = raised.value.args[0]
        assert told.code() == confluent_kafka.KafkaError.GROUP_AUTHORIZATION_FAILED
        assert told.txn_requires_abort(), "the client must not try again"
        kafka.abort_transaction(WAIT_S)
    finally:
        consumer.close()


def join(cluster: Cluster, user: str, group_id: str) -> None:
    """Be a member of a group until it has assigned a partition."""
    with Consumer(
        cluster.bootstrap, group_id=group_id, auto_offset_reset="earliest", config=settings(cluster, user)
    ) as consumer:
        consumer.subscribe(["t-topic"])
        until_s = time.monotonic() + WAIT_S
        while not consumer.assignment():
            assert time.monotonic() < until_s, "the group has assigned nothing"
            consumer.poll(0.1)


def kafka_join(cluster: Cluster, user: str, group_id: str, protocol: str) -> confluent_kafka.KafkaError | None:
    """Be a member of a group with a Kafka client until a record, or an error, has come; return the error."""
    conf = {"group.id": group_id, "group.protocol": protocol, "auto.offset.reset": "earliest"}
    consumer = confluent_kafka.Consumer({**kafka_settings(cluster, user), **conf})
    try:
        consumer.subscribe(["t-topic"])
        message = consumer.poll(WAIT_S)
        assert message is not None, "neither a record nor an error has come"
        return message.error()
    finally:
        consumer.close()


def commit(cluster: Cluster, user: str, group_id: str) -> None:
    """Commit an offset for a group without members."""
    with Admin(cluster.bootstrap, config=settings(cluster, user)) as admin:
        admin.alter_group_offsets(group_id, {TopicPartition("t-topic", 0): 0}, timeout=WAIT_S)


def test_a_tenant_makes_no_more_groups_than_it_may(cluster: Cluster) -> None:
    """By members of every protocol, and by offsets of groups without members; a group that is deleted makes room."""
    with Producer(cluster.bootstrap, config=settings(cluster, TENANT)) as producer:
        producer.send("t-topic", b"x").result(WAIT_S)
    join(cluster, TENANT, "t-member")
    commit(cluster, TENANT, "t-offsets")
    assert kafka_join(cluster, TENANT, "t-classic", "classic") is None
    with pytest.raises(PolicyViolation, match=rf"User:{TENANT} has made 3 groups.*{GROUPS}"):
        join(cluster, TENANT, "t-another")
    with pytest.raises(PolicyViolation, match=rf"User:{TENANT} has made 3 groups.*{GROUPS}"):
        commit(cluster, TENANT, "t-another")
    told = kafka_join(cluster, TENANT, "t-another", "classic")
    assert told is not None
    assert told.code() == confluent_kafka.KafkaError.POLICY_VIOLATION
    told = kafka_join(cluster, TENANT, "t-another", "consumer")
    assert told is not None
    assert told.code() == confluent_kafka.KafkaError._FATAL
    assert "Policy violation" in told.str()
    assert metric(cluster, "ids_of_one_user", GROUPS) == 3
    join(cluster, OTHER, "t-others")
    join(cluster, TENANT, "t-others")

    cluster.kill(1)
    cluster.start(1)
    for group_id in ("t-member", "t-offsets"):
        join(cluster, TENANT, group_id)
    with pytest.raises(PolicyViolation):
        commit(cluster, TENANT, "t-another")
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        listed = sorted(each.group_id for each in admin.list_groups())
        admin.delete_groups(["t-classic"])
    assert listed == ["t-classic", "t-member", "t-offsets", "t-others"]
    assert kafka_join(cluster, TENANT, "t-another", "consumer") is None


def test_topics_of_a_tenant_have_no_more_partitions_than_they_may(cluster: Cluster) -> None:
    """Through both listeners; a restart forgets none, and what an administrator makes does not count."""
    with Admin(cluster.bootstrap, config=settings(cluster, TENANT)) as tenant:
        tenant.create_topic("t-a", partitions=15)
        with pytest.raises(
            PolicyViolation, match=rf"would bring User:{TENANT} from 15 to 21 partitions.*{PARTITIONS}=20"
        ):
            tenant.create_topic("t-b", partitions=6)
    kafka = AdminClient(kafka_settings(cluster, TENANT))
    (refused,) = kafka.create_topics([NewTopic("t-b", num_partitions=6, replication_factor=1)]).values()
    with pytest.raises(confluent_kafka.KafkaException) as told:
        refused.result(WAIT_S)
    assert told.value.args[0].code() == confluent_kafka.KafkaError.POLICY_VIOLATION
    (made,) = kafka.create_topics([NewTopic("t-b", num_partitions=5, replication_factor=1)]).values()
    made.result(WAIT_S)

    cluster.kill(1)
    cluster.start(1)
    with Admin(cluster.bootstrap, config=settings(cluster, TENANT)) as tenant:
        with pytest.raises(PolicyViolation):
            tenant.create_topic("t-c", partitions=1)
        tenant.delete_topic("t-a")
        tenant.create_topic("t-c", partitions=15)
    with Admin(cluster.bootstrap, config=settings(cluster, OTHER)) as other:
        other.create_topic("t-d", partitions=20)
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        admin.create_topic("t-e", partitions=30)
