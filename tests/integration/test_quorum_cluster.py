"""Three servers and more: one metadata quorum, partitions on all of them, and any of them may go."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

import raftlog
from raftlog._core.descriptions import PartitionDescription, QuorumDescription
from raftlog._installed import server_command, server_environment
from raftlog.errors import InvalidConfig, InvalidReplicationFactor, InvalidRequestError
from raftlog.testing import Cluster, ServerFailed
from tests.support.steady import PATIENT

STOP_S = 5.0
"""What stopping may take at most, of one server or of all at once."""


def values_of(bootstrap: str, topic: str, count: int) -> list[bytes | None]:
    values: list[bytes | None] = []
    with raftlog.Consumer(bootstrap, auto_offset_reset="earliest") as consumer:
        consumer.subscribe([topic])
        deadline_s = time.monotonic() + 60
        while len(values) < count and time.monotonic() < deadline_s:
            values += [record.value for record in consumer.poll(timeout=1)]
    return sorted(values)  # type: ignore[type-var] # the tests write no null values


def unfenced(admin: raftlog.Admin) -> list[int]:
    described = admin.describe_cluster(linearizable=True)
    return [broker.broker_id for broker in described.brokers if not broker.fenced]


def test_partitions_are_spread_and_every_broker_serves_its_own(three: Cluster) -> None:
    with raftlog.Admin(three.bootstrap) as admin:
        admin.create_topic("spread", partitions=6)
        leaders = [part.leader for part in admin.describe_topic("spread").partitions]
        assert sorted(set(leaders)) == [1, 2, 3]
        assert three.leader("spread", 4) == leaders[4]
        described = admin.describe_cluster(linearizable=True)
        assert [broker.leaderships >= 2 for broker in described.brokers] == [True] * 3
    with raftlog.Producer(three.bootstrap) as producer:
        deliveries = [producer.send("spread", b"%03d" % n, partition=n % 6) for n in range(120)]
        assert {delivery.result(30).partition for delivery in deliveries} == set(range(6))
    assert values_of(three.bootstrap, "spread", 120) == [b"%03d" % n for n in range(120)]


def test_the_quorum_is_described(three: Cluster) -> None:
    three.wait_for(
        lambda admin: all(voter.state != "joining" for voter in admin.describe_quorum().voters),
        what="every voter has its vote",  # two of three are enough for everything else
    )

    def agreed(admin: raftlog.Admin) -> QuorumDescription | None:
        quorum = admin.describe_quorum()
        same = quorum.leader_id == three.controller() == admin.describe_cluster().controller_id
        states = sorted(voter.state for voter in quorum.voters)
        return quorum if same and states == ["follower", "follower", "leader"] else None

    quorum = three.wait_for(agreed, what="everybody names one leader, whom the others follow")
    assert quorum is not None
    assert [voter.node_id for voter in quorum.voters] == [1, 2, 3]
    assert [seen.broker_id for seen in quorum.observers] == [1, 2, 3]
    assert quorum.commit_index <= quorum.log_end_index


def test_there_are_as_many_replicas_as_brokers_at_most(three: Cluster) -> None:
    with raftlog.Admin(three.bootstrap) as admin:
        with pytest.raises(
            InvalidReplicationFactor, match="of 3 registered brokers 3 are up, so it can be from 1 to 3"
        ):
            admin.create_topic("followed", replication_factor=4)
        followed = admin.create_topic("followed", replication_factor=3)
        assert followed is not None
        assert sorted(followed.partitions[0].isr) == [1, 2, 3]


def test_a_change_is_seen_by_whoever_is_asked_next(three: Cluster) -> None:
    addresses = three.bootstrap.split(",")
    with raftlog.Admin(addresses[0]) as one, raftlog.Admin(addresses[1]) as other:
        for number in range(10):
            one.create_topic(f"seen-{number}")
            assert f"seen-{number}" in one.list_topics()
            assert other.describe_cluster(linearizable=True).metadata_offset > 0
            assert f"seen-{number}" in other.list_topics()


def test_the_controller_is_killed_and_administration_goes_on(three: Cluster) -> None:
    killed = three.controller()
    with raftlog.Admin(three.bootstrap) as admin:
        epoch = admin.describe_cluster().controller_epoch
        three.kill(killed)
        began_s = time.monotonic()
        admin.create_topic("after-the-kill", partitions=2)
        assert time.monotonic() - began_s < 10
        assert three.controller(other_than=killed) != killed
        assert admin.describe_cluster(linearizable=True).controller_epoch > epoch
        three.wait_for(lambda asked: killed not in unfenced(asked), what="the killed broker is fenced")
        three.start(killed)
        assert sorted(unfenced(admin)) == [1, 2, 3]
        voters = three.wait_for(
            lambda asked: (
                (found := asked.describe_quorum().voters)
                and all(voter.state in ("leader", "follower") and voter.lag == 0 for voter in found)
            ),
            what="every voter has caught up",
        )
        assert voters


def test_records_survive_the_restart_of_their_broker_and_clients_find_it_again(three: Cluster) -> None:
    with raftlog.Admin(three.bootstrap) as admin:
        admin.create_topic("restart", partitions=3)
    with raftlog.Producer(three.bootstrap) as producer:
        for number in range(3):
            producer.send("restart", b"0-%d" % number, partition=number).result(30)
        for node_id in three.node_ids:
            (three.kill if node_id == 2 else three.stop)(node_id)
            held = [producer.send("restart", b"%d-%d" % (node_id, number), partition=number) for number in range(3)]
            three.start(node_id)
            for delivery in held:
                delivery.result(30)
    expected = sorted(b"%d-%d" % (round_, number) for round_ in range(4) for number in range(3))
    assert list(dict.fromkeys(values_of(three.bootstrap, "restart", 12))) == expected


def test_a_paused_controller_is_replaced_and_the_other_brokers_serve_on_undisturbed() -> None:
    for _ in range(3):  # a healthy broker that pauses for a moment loses its session as well
        with Cluster(nodes=3) as three:  # sessions of brokers hardly longer than an election takes
            before, after = serve_on(three)
        if before == after:
            break
    assert before == after, "a healthy broker was fenced when the controller changed, in three attempts"


def serve_on(three: Cluster) -> tuple[list[PartitionDescription], list[PartitionDescription]]:
    """Pause the controller for a while; return the partitions that others lead, before and after it."""
    paused = three.controller()
    others = ",".join(address for node_id, address in enumerate(three.bootstrap.split(","), 1) if node_id != paused)
    with raftlog.Admin(others) as admin, raftlog.Producer(others) as producer:
        admin.create_topic("steady", partitions=3)
        before = [part for part in admin.describe_topic("steady").partitions if part.leader != paused]
        three.pause(paused)
        try:
            admin.create_topic("while-paused")
            assert admin.describe_cluster(linearizable=True).controller_id != paused
            three.wait_for(lambda asked: paused not in unfenced(asked), what="the paused broker is fenced")
            for part in before:
                producer.send("steady", b"v", partition=part.partition).result(30)
        finally:
            three.resume(paused)
        three.wait_for(lambda asked: len(unfenced(asked)) == 3, what="all brokers are back")
        after = admin.describe_topic("steady").partitions
        return before, [after[part.partition] for part in before]


def line_of(config: str, key: str) -> str:
    return next(line for line in config.splitlines() if line.startswith(f'"{key}"'))


def test_a_second_process_of_a_controller_is_refused_and_the_first_one_serves_on(
    three: Cluster, tmp_path: Path
) -> None:
    config = (three.directory / "node-3" / "server.toml").read_text()
    config = config.replace(line_of(config, "listeners"), '"listeners" = "127.0.0.1:0"')
    code, log = lone_server(tmp_path, config.replace(str(three.log_dir(3)), str(tmp_path / "elsewhere")))
    assert code == 1, log
    assert "is another server using the port, or is this node running already?" in log
    port = line_of(config, "inter.node.listener")
    code, log = lone_server(tmp_path, config.replace(port, '"inter.node.listener" = "127.0.0.1:9"'))
    assert code == 1, log
    with raftlog.Admin(three.bootstrap) as admin:
        assert sorted(unfenced(admin)) == [1, 2, 3]


def lone_server(directory: Path, config: str, until: str = "") -> tuple[int, str]:
    """Run a server that is to fail; return its exit code and its log. `until`: stop it when the log says so."""
    file, log = directory / "lone.toml", directory / "lone.log"
    file.write_text(config)
    with log.open("wb") as output:
        process = subprocess.Popen(
            server_command("--config", str(file)), env=server_environment(), stderr=output, stdout=output
        )
    deadline_s = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline_s and not (until and until in log.read_text()):
        time.sleep(0.05)
    if process.poll() is None:
        process.terminate()
    return process.wait(10), log.read_text()


def test_voters_that_do_not_match_are_told_apart(three: Cluster, tmp_path: Path) -> None:
    three.stop(3)
    try:
        config = (three.directory / "node-3" / "server.toml").read_text()
        voters = line_of(config, "controller.quorum.voters")
        code, log = lone_server(tmp_path, config.replace(voters, voters.replace("1@", "7@")))
        assert code != 0
        assert "raftlog quorum set-voters" in log
    finally:
        three.start(3)


def test_all_stop_at_once_quickly_and_the_same_directory_is_the_same_cluster(tmp_path: Path) -> None:
    with Cluster(nodes=3, directory=tmp_path) as first:
        bootstrap = first.bootstrap
        with raftlog.Admin(bootstrap) as admin:
            cluster_id = admin.describe_cluster().cluster_id
            admin.create_topic("t", partitions=3)
        with raftlog.Producer(bootstrap) as producer:
            for number in range(3):
                producer.send("t", b"%d" % number, partition=number).result(30)
        began_s = time.monotonic()
        first.stop_all()
        assert time.monotonic() - began_s < STOP_S
    with Cluster(nodes=3, directory=tmp_path) as second:
        with raftlog.Admin(second.bootstrap) as admin:
            assert admin.describe_cluster().cluster_id == cluster_id
        assert values_of(second.bootstrap, "t", 3) == [b"0", b"1", b"2"]
        second.kill(1)
        second.kill(2)
        began_s = time.monotonic()
        second.stop(3)  # without a quorum
        assert time.monotonic() - began_s < STOP_S
    with pytest.raises(InvalidConfig, match="has a cluster of 3 nodes, 3 of them controllers"):
        Cluster(directory=tmp_path).__enter__()


def test_without_a_majority_a_server_waits_says_for_whom_and_stops_when_told(tmp_path: Path) -> None:
    with Cluster(nodes=3, directory=tmp_path) as cluster:
        cluster.stop_all()
        config = (tmp_path / "node-1" / "server.toml").read_text()
        code, log = lone_server(tmp_path, config, until="waiting for the metadata quorum")
        assert code == 0, log
        assert "controller 2 at 127.0.0.1" in log
        assert "controller 3 at 127.0.0.1" in log
        with socket.create_server(("127.0.0.1", 0)) as unused:
            address = f"127.0.0.1:{unused.getsockname()[1]}"
        impatient = Cluster(nodes=3, directory=tmp_path, start_timeout_s=1, config={"metrics.listener": address})
        try:
            impatient.start(1, wait=False)
            deadline_s = time.monotonic() + 60
            while "waiting for the metadata quorum" not in impatient.log_tail(1):
                assert time.monotonic() < deadline_s, impatient.log_tail(1)
                time.sleep(0.05)
            with pytest.raises(urllib.error.HTTPError, match="503") as raised:
                urllib.request.urlopen(f"http://{address}/readyz", timeout=60)
            assert "controller 2 at 127.0.0.1" in raised.value.read().decode()
            # The limit begins here, however long Python took to come so far.
            with pytest.raises(ServerFailed, match=r"is not ready after(?s:.*)waiting for the metadata quorum"):
                impatient.wait_ready(1)
            assert impatient.ending(1) == "by SIGKILL"
        finally:
            impatient.close()


def test_a_broker_cut_off_from_the_controllers_stops_serving_and_comes_back() -> None:
    with Cluster(nodes=3, can_be_partitioned=True, config=PATIENT) as cluster:
        with raftlog.Admin(cluster.bootstrap) as admin:
            admin.create_topic("t", replica_assignment=[[1], [2], [3]])
        controller = cluster.controller()
        victim = next(node_id for node_id in cluster.node_ids if node_id != controller)
        number = victim - 1
        others = [node_id for node_id in cluster.node_ids if node_id != victim]
        with raftlog.Producer(cluster.bootstrap) as producer:
            assert producer.send("t", b"before", partition=number).result(30).offset == 0
            cluster.partition([victim], others)
            cluster.wait_for(lambda asked: victim not in unfenced(asked), what="the broker that is cut off is fenced")
            delivery = producer.send("t", b"meanwhile", partition=number)
            with pytest.raises(TimeoutError):
                delivery.result(timeout=2)
            cluster.heal()
            assert delivery.result(60).offset >= 1
        cluster.wait_for(lambda asked: len(unfenced(asked)) == 3, what="the broker is back")


@pytest.fixture(scope="module")
def dedicated() -> Iterator[Cluster]:
    """Three controllers that are no brokers, and brokers 4 and 5; each test leaves all controllers running."""
    with Cluster(nodes=5, controllers=3, dedicated_controllers=True, config=PATIENT) as cluster:
        yield cluster


def test_three_controllers_and_two_brokers(dedicated: Cluster, tmp_path: Path) -> None:
    assert (dedicated.controller_ids, dedicated.broker_ids) == ([1, 2, 3], [4, 5])
    assert len(dedicated.bootstrap.split(",")) == 2
    with raftlog.Admin(dedicated.bootstrap) as admin:
        assert [broker.broker_id for broker in admin.describe_cluster(linearizable=True).brokers] == [4, 5]
        topic = admin.create_topic("t", partitions=4)
        assert topic is not None
        assert sorted({part.leader for part in topic.partitions}) == [4, 5]
        killed = dedicated.controller()
        dedicated.kill(killed)
        admin.create_topic("u")
        assert dedicated.controller(other_than=killed) in dedicated.controller_ids
    # A second process with the id of a broker, with directories of its own.
    config = (dedicated.directory / "node-4" / "server.toml").read_text()
    config = config.replace(str(dedicated.log_dir(4)), str(tmp_path / "other"))
    for key, elsewhere in (("listeners", "127.0.0.1:0"), ("inter.node.listener", "127.0.0.1:9")):
        config = config.replace(line_of(config, key), f'"{key}" = "{elsewhere}"')
    code, log = lone_server(tmp_path, config)
    assert code == 1
    assert f"another process runs as broker 4 at {dedicated.bootstrap.split(',')[0]} and stays alive" in log
    # Another cluster's id.
    wrong = config.replace(line_of(config, "cluster.id").split('"')[3], "another")
    wrong = wrong.replace('"node.id" = 4', '"node.id" = 6')
    _, log = lone_server(tmp_path, wrong, until="correct cluster.id")
    assert "correct cluster.id" in log
    with raftlog.Admin(dedicated.bootstrap) as admin:
        assert unfenced(admin) == [4, 5]
        for name in ("t", "u"):
            admin.delete_topic(name)
    dedicated.start(killed)


def test_unregistering_needs_a_broker_that_is_gone(dedicated: Cluster) -> None:
    with raftlog.Admin(dedicated.bootstrap) as admin:
        with pytest.raises(InvalidRequestError, match="stop it first"):
            admin.unregister_broker(5)
        dedicated.stop(5)
        dedicated.wait_for(lambda asked: 5 not in unfenced(asked), what="the broker that has stopped is fenced")
        admin.unregister_broker(5)
        assert [broker.broker_id for broker in admin.describe_cluster(linearizable=True).brokers] == [4]
