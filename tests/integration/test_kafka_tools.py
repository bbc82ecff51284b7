"""Kafka's own tools, of Kafka 4.3, as an operator calls them: each `kafka-NAME.sh` is one class of Kafka's jars.

They need Java, and Maven or Kafka's jars (`tests/support/kafka_java.py`).
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import confluent_kafka
import pytest

import raftlog
from raftlog.testing import Cluster
from tests.support.kafka_java import JVM, jars_or_skip
from tests.support.up_to_date import heard_everywhere

pytestmark = pytest.mark.long

TIMEOUT_S: Final = 120.0
TOOLS: Final = {
    "acls": "org.apache.kafka.tools.AclCommand",
    "broker-api-versions": "org.apache.kafka.tools.BrokerApiVersionsCommand",
    "client-metrics": "org.apache.kafka.tools.ClientMetricsCommand",
    "cluster": "org.apache.kafka.tools.ClusterTool",
    "configs": "kafka.admin.ConfigCommand",
    "console-consumer": "org.apache.kafka.tools.consumer.ConsoleConsumer",
    "console-producer": "org.apache.kafka.tools.ConsoleProducer",
    "consumer-groups": "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand",
    "consumer-perf-test": "org.apache.kafka.tools.ConsumerPerformance",
    "delegation-tokens": "org.apache.kafka.tools.DelegationTokenCommand",
    "delete-records": "org.apache.kafka.tools.DeleteRecordsCommand",
    "features": "org.apache.kafka.tools.FeatureCommand",
    "get-offsets": "org.apache.kafka.tools.GetOffsetShell",
    "leader-election": "org.apache.kafka.tools.LeaderElectionCommand",
    "log-dirs": "org.apache.kafka.tools.LogDirsCommand",
    "metadata-quorum": "org.apache.kafka.tools.MetadataQuorumCommand",
    "producer-perf-test": "org.apache.kafka.tools.ProducerPerformance",
    "reassign-partitions": "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
    "topics": "org.apache.kafka.tools.TopicCommand",
    "transactions": "org.apache.kafka.tools.TransactionsCommand",
    "verifiable-producer": "org.apache.kafka.tools.VerifiableProducer",
}


class Tools:
    """Kafka's tools, with the address of a cluster."""

    def __init__(self, jars: Path, cluster: Cluster, *common: str) -> None:
        self._jars = jars
        self._cluster = cluster
        self._common = common

    def __call__(self, name: str, *arguments: str, stdin: str = "", fails: bool = False) -> str:
        """Run `kafka-NAME.sh`, and return what it prints."""
        where = "--bootstrap-server", self._cluster.kafka_bootstrap, *self._common
        ordered = (*arguments, *where) if name == "cluster" else (*where, *arguments)
        done = subprocess.run(
            [*JVM, "-cp", f"{self._jars}/*", TOOLS[name], *ordered],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )
        printed = f"{done.stdout}\n{done.stderr}"
        assert (done.returncode != 0) == fails, printed
        return printed


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    jars_or_skip()
    with Cluster(3, kafka=True) as started:
        yield started


@pytest.fixture(scope="module")
def kafka(cluster: Cluster) -> Tools:
    return Tools(jars_or_skip(), cluster)


def created(cluster: Cluster, topic: str, partitions: int = 1) -> str:
    with raftlog.Admin(cluster.bootstrap) as admin:
        admin.create_topic(topic, partitions=partitions, replication_factor=3)
    heard_everywhere(cluster)
    return topic


def test_topics_and_configs(cluster: Cluster, kafka: Tools) -> None:
    kafka("topics", "--create", "--topic", "made", "--partitions", "2", "--replication-factor", "3")
    heard_everywhere(cluster)
    assert "made" in kafka("topics", "--list").split()
    kafka("topics", "--alter", "--topic", "made", "--partitions", "4")
    heard_everywhere(cluster)
    described = kafka("topics", "--describe", "--topic", "made")
    assert "PartitionCount: 4" in described
    assert "ReplicationFactor: 3" in described
    entity = "--entity-type", "topics", "--entity-name", "made"
    kafka("configs", "--alter", *entity, "--add-config", "retention.ms=60000,cleanup.policy=[compact,delete]")
    heard_everywhere(cluster)
    configs = kafka("configs", "--describe", *entity)
    assert "retention.ms=60000" in configs
    assert "cleanup.policy=compact,delete" in configs
    kafka("configs", "--alter", *entity, "--delete-config", "retention.ms")
    heard_everywhere(cluster)
    assert "retention.ms" not in kafka("configs", "--describe", *entity)
    assert "log.retention" in kafka("configs", "--describe", "--entity-type", "brokers", "--entity-name", "1", "--all")
    assert "does not exist" in kafka("topics", "--describe", "--topic", "absent", fails=True)
    kafka("topics", "--delete", "--topic", "made")
    heard_everywhere(cluster)
    assert "made" not in kafka("topics", "--list").split()


def test_records_and_groups(cluster: Cluster, kafka: Tools, tmp_path: Path) -> None:
    topic = created(cluster, "events", 2)
    kafka("console-producer", "--topic", topic, "--compression-codec", "lz4", stdin="one\ntwo\nthree\n")
    for protocol in ("classic", "consumer"):
        group = f"billing-{protocol}"
        read = kafka(
            "console-consumer", "--topic", topic, "--group", group, "--from-beginning", "--max-messages", "3",
            "--timeout-ms", "60000", "--command-property", f"group.protocol={protocol}",
        )  # fmt: skip
        assert {"one", "two", "three"} <= {*read.split()}
        assert group in kafka("consumer-groups", "--list")
        lags = re.findall(
            rf"^{group} +{topic} +(\d) +(\d+) +(\d+) +(\d+)",
            kafka("consumer-groups", "--describe", "--group", group),
            re.M,
        )
        assert sum(int(each[1]) for each in lags) == 3
        assert {each[3] for each in lags} == {"0"}
        assert "Empty" in kafka("consumer-groups", "--describe", "--group", group, "--state")
        kafka("consumer-groups", "--reset-offsets", "--group", group, "--topic", topic, "--to-earliest", "--execute")
        described = kafka("consumer-groups", "--describe", "--group", group)
        assert sum(int(each) for each in re.findall(rf"{topic} +\d +0 +\d+ +(\d+)", described)) == 3
        kafka("consumer-groups", "--delete-offsets", "--group", group, "--topic", f"{topic}:0")
        kafka("consumer-groups", "--delete", "--group", group)
        assert group not in kafka("consumer-groups", "--list")
    ends = dict(re.findall(rf"^{topic}:(\d):(\d+)", kafka("get-offsets", "--topic", topic), re.M))
    assert sum(map(int, ends.values())) == 3
    deletions = tmp_path / "deletions.json"
    deletions.write_text(
        json.dumps(
            {"partitions": [{"topic": topic, "partition": int(each), "offset": -1} for each in ends], "version": 1}
        )
    )
    kafka("delete-records", "--offset-json-file", str(deletions))
    starts = dict(re.findall(rf"^{topic}:(\d):(\d+)", kafka("get-offsets", "--topic", topic, "--time", "-2"), re.M))
    assert starts == ends


def test_measuring(cluster: Cluster, kafka: Tools) -> None:
    topic = created(cluster, "measured")
    perf = "--topic", topic, "--num-records", "5000", "--record-size", "100", "--throughput", "-1"
    assert "5000 records sent" in kafka("producer-perf-test", *perf)
    within = "--transactional-id", "perf", "--transaction-duration-ms", "100"
    assert "5000 records sent" in kafka("producer-perf-test", *perf, *within)
    assert kafka("consumer-perf-test", "--topic", topic, "--num-records", "9000").count("\n") >= 2
    said = kafka("verifiable-producer", "--topic", topic, "--max-messages", "5")
    assert said.count("producer_send_success") == 5


def test_replicas_and_leaders(cluster: Cluster, kafka: Tools, tmp_path: Path) -> None:
    topic = "moved"
    kafka("topics", "--create", "--topic", topic, "--replica-assignment", "1:2")
    heard_everywhere(cluster)
    moves, json_file = tmp_path / "moves.json", "--reassignment-json-file"

    def move(*replicas: int, **more: Any) -> None:
        partition = {"topic": topic, "partition": 0, "replicas": replicas, **more}
        moves.write_text(json.dumps({"version": 1, "partitions": [partition]}))

    def replicas() -> list[int]:
        with raftlog.Admin(cluster.bootstrap) as admin:
            return list(admin.describe_topic(topic).partitions[0].replicas)

    topics = tmp_path / "topics.json"
    topics.write_text(json.dumps({"version": 1, "topics": [{"topic": topic}]}))
    proposed = kafka(
        "reassign-partitions", "--topics-to-move-json-file", str(topics), "--broker-list", "1,2,3", "--generate"
    )
    assert "Proposed partition reassignment configuration" in proposed
    move(3, 1)
    throttled = "--throttle", "50000000"
    assert "Successfully started" in kafka("reassign-partitions", json_file, str(moves), "--execute", *throttled)
    cluster.wait_for(lambda _: replicas() == [3, 1], what="the move")
    heard_everywhere(cluster)
    verified = kafka("reassign-partitions", json_file, str(moves), "--verify")
    assert f"Reassignment of partition {topic}-0 is completed" in verified
    heard_everywhere(cluster)
    assert "throttled" not in kafka("configs", "--describe", "--entity-type", "topics", "--entity-name", topic)
    assert "No partition reassignments found" in kafka("reassign-partitions", "--list")
    move(2, 1, log_dirs=["any", "any"])
    assert "Successfully started" in kafka("reassign-partitions", json_file, str(moves), "--execute")
    cluster.wait_for(lambda _: replicas() == [2, 1], what="the move without log directories")
    heard_everywhere(cluster)
    move(2, 3, log_dirs=["/elsewhere", "any"])
    refused = kafka("reassign-partitions", json_file, str(moves), "--execute", fails=True)
    assert "UnsupportedVersionException: The node does not support ALTER_REPLICA_LOG_DIRS" in refused, refused
    cluster.wait_for(lambda _: replicas() == [2, 3], what="the move, to directories of the brokers' choice")
    heard_everywhere(cluster)
    one = "--topic", topic, "--partition", "0"
    kafka("leader-election", "--election-type", "preferred", *one)
    cluster.wait_for(lambda admin: admin.describe_topic(topic).partitions[0].leader == 2, what="the preferred leader")
    heard_everywhere(cluster)
    assert "already elected" in kafka("leader-election", "--election-type", "preferred", *one)
    assert f'"partition":"{topic}-0"' in kafka("log-dirs", "--describe", "--topic-list", topic)


def test_the_cluster(cluster: Cluster, kafka: Tools) -> None:
    assert "Cluster ID: " in kafka("cluster", "cluster-id")
    assert kafka("broker-api-versions").count("(id: ") == 3
    assert "LeaderId:" in kafka("metadata-quorum", "describe", "--status")
    assert "Leader" in kafka("metadata-quorum", "describe", "--replication")


def test_what_is_refused_says_so(kafka: Tools, tmp_path: Path) -> None:
    """The table in docs/kafka.md."""
    assert "transaction.version" in kafka("features", "describe")
    raised = kafka("features", "upgrade", "--feature", "transaction.version=1", fails=True)
    assert "does not support UPDATE_FEATURES" in raised
    assert "does not support the broker unregistration API" in kafka("cluster", "unregister", "--id", "3")
    (config := tmp_path / "empty.properties").touch()
    tokens = kafka("delegation-tokens", "--describe", "--command-config", str(config), fails=True)
    assert "does not support DESCRIBE_DELEGATION_TOKEN" in tokens
    assert "does not support LIST_CONFIG_RESOURCES" in kafka("client-metrics", "--list", fails=True)
    member = "remove-controller", "--controller-id", "3", "--controller-directory-id", "A" * 22
    assert "does not support REMOVE_RAFT_VOTER" in kafka("metadata-quorum", *member, fails=True)


def test_transactions(cluster: Cluster, kafka: Tools) -> None:
    topic = created(cluster, "transacted")
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": cluster.kafka_bootstrap, "transactional.id": "left-open", "log_level": 0}
    )
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open", partition=0)
    producer.flush(TIMEOUT_S)
    listed = kafka("transactions", "list")
    assert re.search(r"^left-open\s+\d+\s+\d+\s+Ongoing", listed, re.M), listed
    described = kafka("transactions", "describe", "--transactional-id", "left-open")
    assert "Ongoing" in described
    assert f"{topic}-0" in described
    place = "--topic", topic, "--partition", "0"
    (found,) = re.findall(r"^(\d+)\s+(\d+)\s+.*\s(\d+)\s*$", kafka("transactions", "describe-producers", *place), re.M)
    assert found[2] == "0", "the transaction must be listed as beginning at offset 0"
    hanging = kafka("transactions", "find-hanging", "--broker-id", str(cluster.leader(topic)))
    assert f"{topic}\t" not in hanging, "the open transaction must not count as hanging, as its coordinator knows it"
    kafka("transactions", "abort", *place, "--start-offset", "0")
    assert re.search(rf"^{found[0]}\s.*None\s*$", kafka("transactions", "describe-producers", *place), re.M)
    producer.abort_transaction(TIMEOUT_S)


def test_permissions_and_users(tmp_path: Path) -> None:
    jars, properties = jars_or_skip(), tmp_path / "admin.properties"
    config = {"authorizer": "acl", "super.users": "User:admin"}
    with Cluster(users={"admin": "secret of admin"}, kafka=True, config=config) as cluster:
        login = 'org.apache.kafka.common.security.scram.ScramLoginModule required username="admin"'
        properties.write_text(
            "security.protocol=SASL_SSL\nsasl.mechanism=SCRAM-SHA-512\n"
            f'sasl.jaas.config={login} password="secret of admin";\n'
            f"ssl.truststore.type=PEM\nssl.truststore.location={cluster.authority.ca_file}\n"
        )
        kafka = Tools(jars, cluster, "--command-config", str(properties))
        kafka("acls", "--add", "--allow-principal", "User:ada", "--producer", "--topic", "orders")
        listed = kafka("acls", "--list", "--topic", "orders")
        assert "principal=User:ada, host=*, operation=WRITE, permissionType=ALLOW" in listed
        kafka("acls", "--remove", "--allow-principal", "User:ada", "--producer", "--topic", "orders", "--force")
        assert "User:ada" not in kafka("acls", "--list")
        dora = "--entity-type", "users", "--entity-name", "dora"
        kafka("configs", "--alter", *dora, "--add-config", "SCRAM-SHA-512=[password=secret of dora]")
        assert "SCRAM-SHA-512=iterations=" in kafka("configs", "--describe", *dora)
        kafka("configs", "--alter", *dora, "--add-config", "producer_byte_rate=1000000")
        assert "producer_byte_rate=1000000" in kafka("configs", "--describe", *dora)
