"""TLS between real processes: clients, nodes among each other, new certificates, and turning it on without a pause."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from pyspark_raftlog import DefaultSource

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.errors import BrokerUnavailable, RaftlogError
from raftlog.testing import CertificateAuthority, Cluster, ServerFailed
from raftlog.v1 import controller_pb2, controller_pb2_grpc, raft_pb2, raft_pb2_grpc, replication_pb2
from raftlog.v1.records_pb2 import MetadataCommand, RegisterBrokerCommand
from tests.support.patience import refusal
from tests.support.revocation import revoke
from tests.support.spark_query import SCHEMA
from tests.support.steady import PATIENT

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def lists(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lists") / "crl.pem"


@pytest.fixture(scope="module")
def cluster(lists: Path) -> Iterator[Cluster]:
    made = Cluster(3, tls=True, config={**PATIENT, "ssl.crl.location": str(lists)})
    revoke(made.authority, lists)
    with made:
        with Admin(made.bootstrap, config=made.client_config) as admin:
            admin.create_topic("t", partitions=3, replication_factor=3, configs={"min.insync.replicas": 2}, timeout=60)
        yield made


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> CertificateAuthority:
    return CertificateAuthority(tmp_path_factory.mktemp("other-ca"), "another CA")


def _read_all(cluster: Cluster, topic: str, count: int, config: dict[str, str]) -> list[bytes]:
    with Consumer(cluster.bootstrap, group_id=f"g-{topic}", auto_offset_reset="earliest", config=config) as consumer:
        consumer.subscribe([topic])
        found: list[bytes] = []
        deadline_s = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < deadline_s:
            found += [record.value or b"" for record in consumer.poll(1.0)]
    return found


def test_transactions_and_groups(cluster: Cluster) -> None:
    """What goes over connections between nodes: the quorum, replicas, markers, offsets in transactions."""
    sent = [b"%d" % number for number in range(30)]
    config = cluster.client_config
    with Producer(cluster.bootstrap, transactional_id="tx", config=config) as producer:
        for number, value in enumerate(sent):
            if number % 10 == 0:
                producer.begin_transaction()
            producer.send("t", value, partition=number % 3)
            if number % 10 == 9:
                producer.send_offsets_to_transaction({TopicPartition("t", 0): number}, "others")
                producer.commit_transaction()
    assert sorted(_read_all(cluster, "t", len(sent), config), key=int) == sent


def test_who_has_no_certificate_or_speaks_plaintext_is_told(cluster: Cluster, stranger: CertificateAuthority) -> None:
    cases = [
        ({}, "a listener with TLS to plaintext"),
        ({"security.protocol": "ssl", "ssl.ca.location": str(cluster.authority.ca_file)}, "ssl.certificate.location"),
        (stranger.client_config(), "not from a CA that is trusted here"),
    ]
    for config, words in cases:
        with Admin(cluster.bootstrap, config=config) as admin:
            refusal(BrokerUnavailable, words, lambda limit_s: admin.list_topics(timeout=limit_s), 1.0, 10.0, 30.0)


@pytest.mark.long
def test_spark_takes_the_same_settings(cluster: Cluster) -> None:
    """Without a JVM: the driver's requests to the cluster, and a task's reads, as Spark makes them."""
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        admin.create_topic("for-spark", timeout=60)
    with Producer(cluster.bootstrap, config=cluster.client_config) as producer:
        producer.send("for-spark", b"row")
    secured = {f"kafka.{name}": value for name, value in cluster.client_config.items()}
    address = {"bootstrap.servers": cluster.bootstrap, **secured}
    with pytest.raises(ValueError, match="topic nowhere does not exist"):
        DefaultSource({**address, "topic": "nowhere"}).writer(SCHEMA, overwrite=False)
    source = DefaultSource({**address, "subscribe": "for-spark"})
    reader = source.reader(source.schema())
    tables: list[Any] = [table for part in reader.partitions() for table in reader.read(part)]
    assert [value for table in tables for value in table.column("value").to_pylist()] == [b"row"]


@pytest.mark.long
def test_commands_take_a_file_or_the_servers_own(cluster: Cluster, tmp_path: Path) -> None:
    config = tmp_path / "client.toml"
    config.write_text("".join(f'{name} = "{value}"\n' for name, value in cluster.client_config.items()))

    def command(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "raftlog.cli", *arguments],
            env={name: value for name, value in os.environ.items() if not name.startswith("RAFTLOG_")},
            capture_output=True,
            text=True,
            check=False,
            timeout=PATIENCE_S,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert "t\t3" in command("topic", "list", "--bootstrap", cluster.bootstrap, "--client-config", str(config))
    servers = ("--self", "--config", str(cluster.config_file(2)))
    assert "broker 2 is drained" in command("broker", "drain", *servers)
    assert "broker 2 is no longer drained" in command("broker", "undrain", *servers)


@pytest.mark.long
def test_a_killed_leader_comes_back(cluster: Cluster) -> None:
    dead = cluster.leader("t")
    cluster.kill(dead)
    with Producer(cluster.bootstrap, config=cluster.client_config) as producer:
        producer.send("t", b"without it", partition=0).result(PATIENCE_S)
    cluster.start(dead)
    cluster.wait_for(
        lambda admin: all(len(part.isr) == 3 for part in admin.describe_topic("t").partitions),
        what="every replica in sync",
        timeout_s=PATIENCE_S,
    )


def _inter_node_address(cluster: Cluster, node_id: int) -> str:
    voters = cluster.config_file(node_id).read_text().split('"controller.quorum.voters" = "')[1].split('"')[0]
    return next(each.partition("@")[2] for each in voters.split(",") if each.startswith(f"{node_id}@"))


def _secure_channel(cluster: Cluster, node_id: int, pem: Path) -> aio.Channel:
    content = pem.read_bytes()
    credentials = grpc.ssl_channel_credentials(cluster.authority.ca_file.read_bytes(), content, content)
    return aio.secure_channel(_inter_node_address(cluster, node_id), credentials)


async def _refusal(call: Any, first: Any = None) -> str:
    """Return with what words a call is refused, after writing `first` on it if it is a stream."""
    with pytest.raises(aio.AioRpcError) as caught:
        if first is None:
            await call
        else:
            await call.write(first)
            await call.read()
            await call
    assert caught.value.code() is grpc.StatusCode.PERMISSION_DENIED
    return caught.value.details() or ""


def test_clients_are_no_nodes_and_nodes_no_others(cluster: Cluster) -> None:
    """A certificate of the right CA is not enough: it has to name the node that its owner says it is."""
    client = cluster.authority.directory / "client.pem"
    second = cluster.authority.directory / "node-2.pem"

    async def scenario() -> None:
        barrier = controller_pb2.BarrierRequest()
        async with _secure_channel(cluster, 1, client) as channel:
            said = await _refusal(controller_pb2_grpc.ControllerStub(channel).Barrier(barrier, timeout=PATIENCE_S))
            assert "this listener serves nodes only, and the certificate names no node" in said
        async with _secure_channel(cluster, 1, second) as channel:
            controller = controller_pb2_grpc.ControllerStub(channel)
            await controller.Barrier(barrier, timeout=PATIENCE_S)
            hello = raft_pb2.RaftFrame(hello=raft_pb2.RaftHello(node_id=3))
            said = await _refusal(raft_pb2_grpc.RaftStub(channel).Exchange(timeout=PATIENCE_S), hello)
            assert "this is said to be of node 3, with a certificate of node 2" in said
            command = MetadataCommand(register_broker=RegisterBrokerCommand(broker_id=3))
            propose = controller.Propose(controller_pb2.ProposeRequest(command=command), timeout=PATIENCE_S)
            assert "said to be of node 3" in await _refusal(propose)
            heartbeats = controller.Heartbeat(timeout=PATIENCE_S)
            await heartbeats.write(controller_pb2.HeartbeatRequest(broker_id=3, broker_epoch=1))
            with pytest.raises(aio.AioRpcError, match="said to be of node 3") as refused:
                await heartbeats.read()
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED

    asyncio.run(scenario())


def _follower_refusal(cluster: Cluster) -> str:
    async def scenario() -> str:
        with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
            found = admin.describe_cluster()
        third = next(broker for broker in found.brokers if broker.broker_id == 3)
        hello = replication_pb2.ReplicaHello(
            broker_id=3, broker_epoch=third.broker_epoch, cluster_id=found.cluster_id, leader_id=1
        )
        async with _secure_channel(cluster, 1, cluster.authority.directory / "node-2.pem") as channel:
            call: Any = channel.stream_stream(
                "/raftlog.v1.Replication/Replicate",
                request_serializer=replication_pb2.ReplicateRequest.SerializeToString,
                response_deserializer=replication_pb2.ReplicateResponse.FromString,
            )(timeout=PATIENCE_S)
            return await _refusal(call, replication_pb2.ReplicateRequest(hello=hello))

    return asyncio.run(scenario())


def test_nobody_follows_in_anothers_name(cluster: Cluster) -> None:
    assert "this is said to be of node 3, with a certificate of node 2" in _follower_refusal(cluster)


def _shown(cluster: Cluster, node_id: int) -> str:
    """Return the serial number of the certificate that a broker shows to clients."""
    config = cluster.client_config
    context = ssl.create_default_context(cafile=config["ssl.ca.location"])
    context.load_cert_chain(config["ssl.certificate.location"])
    context.set_alpn_protocols(["h2"])
    port = int(cluster.bootstrap.split(",")[node_id - 1].rpartition(":")[2])
    with (
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as plain,
        context.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
    ):
        found = secured.getpeercert()
        assert found is not None
        return str(found["serialNumber"])


def test_a_new_certificate_is_shown_without_a_restart(cluster: Cluster) -> None:
    before = _shown(cluster, 1)
    cluster.authority.issue("node-1", node_ids=[1])
    deadline_s = time.monotonic() + PATIENCE_S
    while _shown(cluster, 1) == before:
        assert time.monotonic() < deadline_s, f"the broker still shows the old certificate after {PATIENCE_S:g} s"
        time.sleep(0.1)
    with Producer(cluster.bootstrap, config=cluster.client_config) as producer:
        producer.send("t", b"after").result(PATIENCE_S)


def _log(cluster: Cluster, node_id: int) -> str:
    return (cluster.directory / f"node-{node_id}" / "server.log").read_text()


@pytest.mark.long
def test_a_revoked_node_loses_its_streams_and_comes_back_with_a_new_certificate(cluster: Cluster, lists: Path) -> None:
    """Nodes 1 and 2 close node 3's connections and refuse its calls: it is fenced, and its followers have gone."""
    _wait_in_sync(cluster, cluster.client_config)
    revoke(cluster.authority, lists, cluster.authority.directory / "node-3.pem")
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:

        def isrs() -> set[frozenset[int]]:
            return {frozenset(part.isr) for part in admin.describe_topic("t", timeout=60).partitions}

        deadline_s = time.monotonic() + PATIENCE_S
        while isrs() != {frozenset({1, 2})}:
            assert time.monotonic() < deadline_s, "the revoked node stays in sync"
            time.sleep(0.2)
    for node_id in (1, 2):
        (closed,) = [line for line in _log(cluster, node_id).splitlines() if "closed connections of nodes" in line]
        assert "nodes=[3]" in closed
    assert "the certificate has been revoked by its CA" in _log(cluster, 3)
    with Producer(cluster.bootstrap, config=cluster.client_config) as producer:
        producer.send("t", b"without node 3").result(PATIENCE_S)
    cluster.authority.issue("node-3", node_ids=[3])
    _wait_in_sync(cluster, cluster.client_config)


@pytest.mark.long
def test_a_node_with_anothers_certificate_does_not_start(cluster: Cluster) -> None:
    cluster.stop(2)
    mine = str(cluster.authority.directory / "node-2.pem")
    cluster.configure(2, {"ssl.keystore.location": str(cluster.authority.directory / "node-3.pem")})
    try:
        with pytest.raises(ServerFailed, match=r"exit code 2 [\s\S]*does not name this node \(it names nodes: 3\)"):
            cluster.start(2)
    finally:
        cluster.configure(2, {"ssl.keystore.location": mine})
        cluster.start(2)


@pytest.mark.long
def test_clients_may_be_let_in_without_a_certificate() -> None:
    with Cluster(1, tls=True, ssl_client_auth="none") as cluster:
        config = {"security.protocol": "ssl", "ssl.ca.location": str(cluster.authority.ca_file)}
        with Admin(cluster.bootstrap, config=config) as admin:
            admin.create_topic("t", timeout=60)
        with Producer(cluster.bootstrap, config=config) as producer:
            assert producer.send("t", b"x").result(PATIENCE_S).offset == 0


class _Load(threading.Thread):
    """Sends one record after the other, each acknowledged, until it is stopped or told to take other settings."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(name="load", daemon=True)
        self._cluster = cluster
        self._ended = threading.Event()
        self.config: dict[str, str] = {}
        self.in_use: dict[str, str] | None = None
        """With what settings the last record was acknowledged."""
        self.sent: list[bytes] = []
        self.errors: list[RaftlogError] = []

    def run(self) -> None:
        while not self._ended.is_set():
            config = self.config
            try:
                with Producer(self._cluster.bootstrap, config=config) as producer:
                    while not self._ended.is_set() and config is self.config:
                        value = b"%d" % len(self.sent)
                        producer.send("t", value).result(PATIENCE_S)
                        self.sent.append(value)
                        self.in_use = config
                        self._ended.wait(0.02)
            except RaftlogError as error:
                self.errors.append(error)

    def take(self, config: dict[str, str]) -> None:
        """Go on with other settings, and return when that is so."""
        self.config = config
        deadline_s = time.monotonic() + PATIENCE_S
        while self.in_use is not config:
            assert time.monotonic() < deadline_s, self.errors
            time.sleep(0.01)

    def stop(self) -> None:
        self._ended.set()
        self.join(PATIENCE_S)
        assert not self.is_alive()


@pytest.mark.long
def test_tls_is_turned_on_by_rolling_restarts_and_clients_notice_nothing() -> None:
    """The three steps of docs/security.md. A TLS that no rolling restart can turn on: redpanda helm #442."""
    with Cluster(3, config=PATIENT) as cluster:
        authority = cluster.authority
        with Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", replication_factor=3, configs={"min.insync.replicas": 2}, timeout=60)
        load = _Load(cluster)
        load.start()
        try:
            steps: list[dict[str, Any]] = [
                {"listener.security.migration": True, "listener.security.protocol": "plaintext"},
                {"listener.security.protocol": "ssl"},
                {"listener.security.migration": False},
            ]
            for number, step in enumerate(steps):
                if number == 2:
                    load.take(authority.client_config())
                for node_id in cluster.node_ids:
                    _wait_in_sync(cluster, load.config)
                    cluster.stop(node_id)
                    cluster.configure(node_id, {**(authority.node_config(node_id) if number == 0 else {}), **step})
                    cluster.start(node_id)
            _wait_in_sync(cluster, load.config)
        finally:
            load.stop()
        assert not load.errors
        with Admin(cluster.bootstrap) as admin:
            words = "a listener with TLS to plaintext"
            refusal(BrokerUnavailable, words, lambda limit_s: admin.list_topics(timeout=limit_s), 1.0, 10.0, 30.0)
        found = _read_all(cluster, "t", len(load.sent), authority.client_config())
        assert sorted(found, key=int) == load.sent


def _wait_in_sync(cluster: Cluster, config: dict[str, str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    with Admin(cluster.bootstrap, config=config) as admin:
        while any(len(part.isr) < 3 for part in admin.describe_topic("t").partitions):
            assert time.monotonic() < deadline_s, f"the replicas are not in sync again after {PATIENCE_S:g} s"
            time.sleep(0.1)
