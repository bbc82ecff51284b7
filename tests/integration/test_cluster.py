"""`raftlog.testing.Cluster`: real processes that start, stop, die and come back with their data."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

import raftlog
from broker.server.quorum_role import FIRST_WORD_S
from raftlog.errors import InvalidConfig
from raftlog.testing import Cluster, ServerFailed


def send(bootstrap: str, topic: str, *values: bytes) -> list[int]:
    with raftlog.Producer(bootstrap) as producer:
        deliveries = [producer.send(topic, value, partition=0) for value in values]
        return [delivery.result(timeout=90).offset for delivery in deliveries]


def values_of(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    place = raftlog.TopicPartition(topic, 0)
    values: list[bytes | None] = []
    with raftlog.Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.assign([place])
        consumer.seek(place, 0)
        while len(values) < count:
            values += [record.value for record in consumer.poll(timeout=30)]
    return values


def test_records_survive_kill_stop_and_start_on_the_same_port() -> None:
    with Cluster() as cluster:
        bootstrap = cluster.bootstrap
        with raftlog.Admin(bootstrap) as admin:
            admin.create_topic("t")
        assert send(bootstrap, "t", b"a", b"b") == [0, 1]
        cluster.kill(1)
        assert not cluster.is_running(1)
        with pytest.raises(ServerFailed, match="server 1 is not running"):
            cluster.kill(1)
        cluster.start(1)
        assert cluster.bootstrap == bootstrap
        assert send(bootstrap, "t", b"c") == [2]
        cluster.stop(1)
        cluster.start(1)
        assert values_of(bootstrap, "t", 3) == [b"a", b"b", b"c"]
        assert list(cluster.log_dir(1).glob("t-0/*.log"))


def test_a_paused_server_goes_on_where_it_was() -> None:
    with Cluster() as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t")
        with raftlog.Producer(cluster.bootstrap) as producer:
            producer.send("t", b"a").result(timeout=90)
            cluster.pause(1)
            delivery = producer.send("t", b"b")
            with pytest.raises(TimeoutError):
                delivery.result(timeout=0.5)
            cluster.resume(1)
            assert delivery.result(timeout=90).offset == 1


def test_the_leader_of_what_is_not_there_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("raftlog.testing.cluster._APPEARS_S", 0.0)
    with Cluster() as cluster, raftlog.Admin(cluster.bootstrap) as admin:
        with pytest.raises(ServerFailed, match="there is no topic 't'; create it first: Admin"):
            cluster.leader("t")
        admin.create_topic("t")
        assert cluster.leader("t") == 1
        with pytest.raises(ServerFailed, match="topic 't' has no partition 1; it has 1 partition"):
            cluster.leader("t", 1)


def test_ctrl_c_does_not_reach_a_server_and_priorities_do() -> None:
    """Ctrl-C goes to a process group; priorities count within a session only (`sched(7)`, autogroup)."""
    with Cluster() as cluster:
        assert os.getpgid(cluster.pid(1)) != os.getpgrp()
        assert os.getsid(cluster.pid(1)) == os.getsid(0)


def test_closing_ends_every_process_even_a_paused_one_and_removes_what_was_temporary(tmp_path: Path) -> None:
    with Cluster() as cluster:
        directory, pid = cluster.directory, cluster.pid(1)
        cluster.pause(1)
    assert not directory.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with Cluster(directory=tmp_path):
        pass
    assert (tmp_path / "node-1" / "server.log").exists()


def test_the_fixtures_are_clusters(raftlog_cluster: Cluster, raftlog_session_cluster: Cluster) -> None:
    assert raftlog_session_cluster.bootstrap != raftlog_cluster.bootstrap
    with raftlog.Admin(raftlog_session_cluster.bootstrap) as admin:
        assert [broker.broker_id for broker in admin.describe_cluster().brokers] == [1]
    with raftlog.Admin(raftlog_cluster.bootstrap) as admin:
        assert len(admin.describe_cluster().brokers) == 1


def test_server_keys_reach_the_server_and_a_wrong_one_is_named() -> None:
    with Cluster(num_partitions=3) as cluster, raftlog.Admin(cluster.bootstrap) as admin:
        assert admin.describe_configs(broker=1)["num.partitions"].value == "3"
    with pytest.raises(ServerFailed, match=r"exit code 2 while starting(.|\n)*num.partition"):
        Cluster(config={"num.partition": 3}).__enter__()


def test_a_port_in_use_is_told_with_the_servers_own_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAFTLOG_NODE_ID", "99")  # a test's cluster takes no settings from the environment
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed) as caught:
            Cluster(port=port).__enter__()
    assert "server 1 ended with exit code 1 while starting" in str(caught.value)
    assert str(port) in str(caught.value)


def test_the_constructor_makes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cluster = Cluster()
    assert list(tmp_path.iterdir()) == []
    with cluster:
        assert list(tmp_path.iterdir()) == [cluster.directory]
        assert cluster.directory.stat().st_mode & 0o777 == 0o700
    assert list(tmp_path.iterdir()) == []


def test_its_directories_and_files_are_their_owners_alone(tmp_path: Path) -> None:
    """What the servers write, and what starts them: settings, and logs with the names of users and topics."""
    before = os.umask(0)
    try:
        config: dict[str, str | bool] = {"authorizer": "acl", "super.users": "User:admin", "audit.topic.enable": True}
        with Cluster(directory=tmp_path / "data", users={"admin": "secret"}, kafka=True, config=config) as cluster:
            with raftlog.Admin(cluster.bootstrap, config=cluster.client_config_of("admin")) as admin:
                admin.create_topic("t")
            found = [cluster.directory, *cluster.directory.rglob("*")]
            open_to_others = {str(path): oct(path.stat().st_mode) for path in found if path.stat().st_mode & 0o077}
            assert open_to_others == {}
            assert len(found) > 20
    finally:
        os.umask(before)


def test_a_failed_start_quotes_its_own_lines_and_the_error_last(tmp_path: Path) -> None:
    log = tmp_path / "node-1" / "server.log"
    log.parent.mkdir()
    log.write_text("error: of an earlier start\n")
    with pytest.raises(ServerFailed) as caught:
        Cluster(directory=tmp_path, config={"num.partition": 3}).__enter__()
    lines = str(caught.value).splitlines()
    assert "an earlier start" not in str(caught.value)
    assert lines[-1].startswith("error: ")


def test_a_directory_belongs_to_one_cluster_until_it_ends(tmp_path: Path) -> None:
    with Cluster(directory=tmp_path) as first:
        with pytest.raises(ServerFailed, match=rf"in use: process {os.getpid()} runs a server there"):
            Cluster(directory=tmp_path).__enter__()
        assert first.is_running(1)
        assert first.ending(1) is None
        first.kill(1)
        assert first.ending(1) == "by SIGKILL"
    with Cluster(directory=tmp_path):
        pass


@pytest.mark.parametrize(
    ("keyword", "guess"),
    [("node", "did you mean 'nodes'"), ("num_partition", "did you mean 'num_partitions'"), ("x", "configuration.md")],
)
def test_a_mistyped_keyword_is_refused_at_once(keyword: str, guess: str) -> None:
    keywords: dict[str, Any] = {keyword: 1}
    with pytest.raises(InvalidConfig, match=f"'{keyword}' is neither a parameter.*{guess}"):
        Cluster(**keywords)


def test_a_cluster_shows_its_directory_servers_and_addresses(tmp_path: Path) -> None:
    cluster = Cluster(nodes=2, directory=tmp_path)
    assert repr(cluster) == f"<Cluster in {tmp_path}: nodes 1 stopped, 2 stopped; bootstrap none yet>"
    with Cluster() as alone:
        assert repr(alone) == f"<Cluster in {alone.directory}: nodes 1 running; bootstrap {alone.bootstrap}>"


def test_a_cluster_that_cannot_be_is_refused() -> None:
    for nodes, controllers in ((0, 1), (3, 2), (1, 3)):
        with pytest.raises(InvalidConfig, match="nodes="):
            Cluster(nodes, controllers=controllers)
    with pytest.raises(InvalidConfig, match="leaves no broker"):
        Cluster(nodes=3, dedicated_controllers=True)
    with Cluster() as cluster:
        with pytest.raises(InvalidConfig, match="no server 2; this cluster has 1"):
            cluster.kill(2)
        with pytest.raises(InvalidConfig, match="can_be_partitioned=True"):
            cluster.partition([1], [1])


def test_a_start_tells_what_it_is_and_a_failed_one_nothing_but_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_VERBOSITY", "ERROR")  # as it is in every process that has imported grpc
    started = time.monotonic()
    with Cluster(2, controllers=1, dedicated_controllers=True) as cluster:
        took_s = time.monotonic() - started
        logs = [cluster.directory / f"node-{node_id}" / "server.log" for node_id in cluster.node_ids]
        controller, broker = (log.read_text() for log in logs)
    assert "starting node 1, roles controller [" in controller
    assert "node ready [event=node_ready node_id=1 roles=controller inter_node=" in controller
    assert "starting node 2, roles broker [" in broker
    if took_s < FIRST_WORD_S:  # on a busy machine a word may be due
        assert "waiting for" not in controller + broker
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerFailed) as caught:
            Cluster(directory=tmp_path, port=port).start_all()
    said = str(caught.value)
    assert (
        f"error: cannot listen on 127.0.0.1:{port}: address already in use; is another server using the port?" in said
    )
    assert "event loop lag" not in said
    assert "GRPC_VERBOSITY" not in said
    assert "add_port" not in said
