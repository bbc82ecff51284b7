"""`raftlog broker`: when a broker may be stopped; cordoned and drained brokers."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from raftlog._core.descriptions import PartitionDescription, TopicDescription
from raftlog.cli import servers
from raftlog.cli.nodes import draining
from raftlog.cli.nodes.draining import Astray, Leaderships, astray, leaderships, named
from raftlog.testing import Cluster, ServerFailed
from raftlog.types import TopicPartition
from raftlog.v1.records_pb2 import PartitionRef
from raftmeta.features import METADATA_VERSION, SUPPORTED
from tests.support import memory_metadata
from tests.support.admin_service import AdminServer
from tests.support.command_line import Ran, Run
from tests.support.metadata import create_topic, elect
from tests.support.pauses import instead_of_sleeping


def test_brokers_are_listed(run: Run) -> None:
    ran = run("broker", "list", "-o", "json")
    assert ran.code == 0
    assert [(each["broker_id"], each["state"]) for each in ran.json] == [(id, "active") for id in (1, 2, 3, 4)]


def test_a_broker_may_stop_while_all_are_in_sync_or_it_is_not(server: AdminServer, run: Run) -> None:
    ran = run("broker", "await-safe-stop", "1", "--timeout", "0")
    assert (ran.code, ran.out) == (0, "broker 1 may stop: no partition falls below min.insync.replicas\n")
    server.set_isr("a", [1, 3])
    assert run("broker", "await-safe-stop", "2", "--timeout", "0").code == 0, (
        "broker 2 must be free to stop, as it is out of sync already"
    )


def test_a_broker_that_is_needed_is_named_with_what_needs_it(server: AdminServer, run: Run) -> None:
    server.set_isr("a", [1, 3])
    ran = run("broker", "await-safe-stop", "3", "--timeout", "0")
    assert ran.code == 1
    assert ran.out == ""
    assert "1 partition needs it: a-0 (in sync: 1, 3; min.insync.replicas=2)" in ran.err
    assert "broker 3 is still needed after 0 s" in ran.err


def test_it_waits_until_others_are_in_sync_again(
    server: AdminServer, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.set_isr("a", [1, 3])
    pauses: list[float] = []

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 3:
            server.set_isr("a", [1, 2, 3])

    instead_of_sleeping(monkeypatch, sleep)
    ran = run("broker", "await-safe-stop", "1", "--timeout", "300")
    assert ran.code == 0
    assert pauses == [draining.LOOK_EVERY_S] * 3
    assert ran.err.count("waiting") == 1, "the wait must be printed once, not at each look"


def test_what_no_waiting_would_help_does_not_hold_it_up(server: AdminServer, run: Run) -> None:
    command = create_topic("narrow", 2, 1, 2, {"min.insync.replicas": "2"})
    command.create_topic.assignments.add(replicas=[1, 2])
    server.propose(command)
    server.set_isr("narrow", [1])
    assert run("broker", "await-safe-stop", "1", "--timeout", "0").code == 0


def test_internal_topics_are_waited_for_as_well(server: AdminServer, run: Run) -> None:
    """No offset can be committed while they take no writes."""
    command = create_topic("__consumer_offsets", 2, 1, 3, {"min.insync.replicas": "2"})
    command.create_topic.assignments.add(replicas=[1, 2, 3])
    server.propose(command)
    server.set_isr("__consumer_offsets", [1, 3])
    ran = run("broker", "await-safe-stop", "3", "--timeout", "0s")
    assert ran.code == 1
    assert "__consumer_offsets-0 (in sync: 1, 3" in ran.err


@pytest.mark.parametrize(("text", "said"), [("60", 60.0), ("60s", 60.0), ("2m", 120.0), ("0.5", 0.5), ("500ms", 0.5)])
def test_timeouts_are_seconds_or_have_a_unit(text: str, said: float) -> None:
    assert draining.seconds(text) == said


@pytest.mark.parametrize("text", ["soon", "-1", "nan", "inf", "", "-5s"])
def test_what_is_no_timeout_is_a_wrong_command_line(run: Run, text: str) -> None:
    ran = run("broker", "await-safe-stop", "1", f"--timeout={text}")
    assert ran.code == 2
    assert "such as 90s or 2m" in ran.err


NEWEST = SUPPORTED[METADATA_VERSION].max_level
A0, A1 = TopicPartition("a", 0), TopicPartition("a", 1)


def settle(server: AdminServer) -> None:
    """Act as the controller: revoke, and hand over."""
    everything = [
        PartitionRef(topic_id=topic_id, partition=part.partition)
        for topic_id, topic in server.image.topics.items()
        for part in topic.partitions
    ]
    for handed_over in (False, True):
        server.propose(elect(everything, handed_over=handed_over))


@pytest.fixture
def while_waiting(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], None]], None]:
    """Have something done at every pause, instead of pausing."""

    def install(work: Callable[[], None]) -> None:
        instead_of_sleeping(monkeypatch, lambda _: work())

    return install


def states(run: Run) -> dict[str, str]:
    """Return the rows of the table of brokers."""
    return {row["broker_id"]: row["state"] for row in run("broker", "list").table}


def test_a_broker_is_cordoned_until_it_is_uncordoned(run: Run) -> None:
    ran = run("broker", "cordon", "4")
    assert (ran.code, ran.out) == (0, "broker 4 is cordoned\n")
    assert states(run) == {"1": "active", "2": "active", "3": "active", "4": "active, cordoned"}
    listed = run("broker", "list", "-o", "json").json[3]
    assert (listed["state"], listed["cordoned"], listed["drained"]) == ("active", True, False)
    assert run("broker", "uncordon", "4", "-o", "json").json == {"broker_id": 4, "cordoned": False}
    assert states(run)["4"] == "active"


def test_what_is_not_there_or_drained_is_refused(run: Run) -> None:
    ran = run("broker", "cordon", "9")
    assert (ran.code, ran.err) == (1, "error: broker 9 is not registered; the cluster has 1, 2, 3, 4\n")
    assert run("broker", "drain", "3", "--no-wait").code == 0
    ran = run("broker", "uncordon", "3")
    assert ran.code == 1
    assert "raftlog broker undrain 3" in ran.err


def test_draining_without_waiting_only_says_so(server: AdminServer, run: Run) -> None:
    ran = run("broker", "drain", "1", "--no-wait")
    assert (ran.code, ran.out) == (0, "broker 1 is drained\n")
    assert states(run)["1"] == "active, drained"
    assert run("broker", "drain", "2", "--no-wait", "--until-restart").code == 0
    assert states(run)["2"] == "active, drained until it restarts"
    assert server.image.brokers[2].drained_until_restart


def test_draining_waits_until_others_lead(
    server: AdminServer, run: Run, while_waiting: Callable[[Callable[[], None]], None]
) -> None:
    while_waiting(lambda: settle(server))
    ran = run("broker", "drain", "1")
    assert ran.code == 0
    assert ran.err == "waiting: 1 leadership to move: a-0\n"
    assert (
        ran.out
        == "broker 1 is drained: no partition falls below min.insync.replicas when it stops, and it leads nothing\n"
    )
    assert [part.leader for part in server.image.topics[_topic(server)].partitions] == [2, 2]


def test_draining_waits_until_the_broker_may_stop_and_it_stays_drained_when_the_time_is_up(
    server: AdminServer, run: Run
) -> None:
    server.set_isr("a", [1, 3])
    ran = run("broker", "drain", "3", "--timeout", "0")
    assert (ran.code, ran.out) == (1, "")
    assert "broker 3 is drained, but still needed after 0 s: 1 partition needs it: a-0 (in sync: 1, 3;" in ran.err
    assert "start the brokers of replicas that are out of sync; raftlog broker undrain 3 undoes it" in ran.err
    assert states(run)["3"] == "active, drained"


def test_what_nobody_else_can_lead_is_named_and_not_waited_for(server: AdminServer, run: Run) -> None:
    for number, name in enumerate(("alone", "beside-a-drained-one"), 2):
        command = create_topic(name, number, 1, number - 1, {})
        command.create_topic.assignments.add(replicas=[4, 3][: number - 1])
        server.propose(command)
    assert run("broker", "drain", "3", "--no-wait").code == 0
    ran = run("broker", "drain", "4", "--timeout", "0", "-o", "json")
    assert ran.code == 0
    assert ran.json == {"broker_id": 4, "drained": True, "staying": ["alone-0", "beside-a-drained-one-0"]}
    assert "note: 2 partitions have no other replica that can lead" in ran.err


def test_undraining_brings_leaderships_back(
    server: AdminServer, run: Run, while_waiting: Callable[[Callable[[], None]], None]
) -> None:
    assert run("broker", "drain", "1", "--no-wait").code == 0
    settle(server)
    while_waiting(lambda: settle(server))
    ran = run("broker", "undrain", "1")
    assert (ran.code, ran.err) == (0, "waiting: 1 leadership to come back: a-0\n")
    assert ran.out == "broker 1 is no longer drained; 1 leadership moved to it\n"
    assert [part.leader for part in server.image.topics[_topic(server)].partitions] == [1, 2]
    assert run("broker", "undrain", "1", "-o", "json").json == {"broker_id": 1, "drained": False, "elected": []}


def test_undraining_waits_for_what_is_not_in_sync_yet(server: AdminServer, run: Run) -> None:
    assert run("broker", "drain", "1", "--no-wait").code == 0
    settle(server)
    server.set_isr("a", [2, 3])
    ran = run("broker", "undrain", "1", "--timeout", "0")
    assert ran.code == 1
    assert (
        "broker 1 is no longer drained, but it is not in sync, or does not lead its partitions again, after 0 s: "
        "1 replica to come in sync: a-0; 1 leadership to come back: a-0"
    ) in ran.err
    assert states(run)["1"] == "active"
    assert run("broker", "undrain", "1", "--no-wait").code == 0


def test_undraining_waits_for_replicas_that_lead_nothing(
    server: AdminServer, run: Run, while_waiting: Callable[[Callable[[], None]], None]
) -> None:
    server.set_isr("a", [1, 2])
    while_waiting(lambda: server.set_isr("a", [1, 2, 3]))
    ran = run("broker", "undrain", "3")
    assert (ran.code, ran.err) == (0, "waiting: 1 replica to come in sync: a-0\n")
    assert ran.out == "broker 3 is no longer drained; 0 leaderships moved to it\n"


# Which broker


@pytest.fixture
def file(server: AdminServer, tmp_path: Path) -> Path:
    """The configuration of broker 2, which listens where the server does, on any address."""
    port = server.bootstrap.rpartition(":")[2]
    path = tmp_path / "server.toml"
    path.write_text(
        f'node.id = 2\nlog.dirs = "{tmp_path}"\nlisteners = "0.0.0.0:{port}"\ninsecure = true\n'
        f'advertised.listeners = "nowhere.invalid:{port}"\n'
    )
    return path


def test_a_server_s_file_names_the_broker_and_where_it_is(
    server: AdminServer, run: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAFTLOG_BOOTSTRAP")
    ran = run("broker", "drain", "--self", "--config", str(file), "--no-wait", "--until-restart", "--timeout", "60s")
    assert ran.code == 0, ran.err
    assert server.image.brokers[2].drained_until_restart
    address = ("--bootstrap", server.bootstrap)
    ran = run("broker", "undrain", "--self", "--config", str(file), "--no-wait", *address)
    assert (ran.code, server.image.brokers[2].drained) == (0, False)


def test_a_controller_alone_has_nothing_to_drain(run: Run, file: Path) -> None:
    text = file.read_text() + 'process.roles = "controller"\ncontroller.quorum.voters = "2@127.0.0.1:9093"\n'
    file.write_text(text + 'inter.node.listener = "127.0.0.1:9093"\n')
    ran = run("broker", "drain", "--self", "--config", str(file))
    assert ran.code == 0
    assert ran.err == "node 2 is a controller, not a broker: nothing to do\n"


def test_a_file_with_which_no_server_would_start(run: Run, file: Path) -> None:
    file.write_text("node.id = 2\nlog.dir = 3\n")
    ran = run("broker", "drain", "--self", "--config", str(file))
    assert ran.code == 1
    assert "log.dir" in ran.err
    assert "Traceback" not in ran.err


def test_a_file_with_users_that_is_no_good(run: Run, file: Path, tmp_path: Path) -> None:
    users = tmp_path / "users.toml"
    users.write_text('admin = ""\n')
    stores = "".join(f'"ssl.{store}.location" = "{users}"\n' for store in ("keystore", "truststore"))
    more = f'"listener.security.protocol" = "sasl_ssl"\n{stores}"sasl.users.location" = "{users}"\n'
    file.write_text(file.read_text() + more)
    ran = run("broker", "drain", "--self", "--config", str(file))
    assert ran.code == 1
    assert ran.err.startswith("error: ")
    assert str(users) in ran.err
    assert "InvalidConfig" not in ran.err, "the message must give the reason, not the name of the exception"


@pytest.mark.parametrize("arguments", [(), ("2", "--self", "--config", "FILE"), ("--self",), ("2", "--config", "FILE")])
def test_one_broker_is_named_in_one_way(run: Run, file: Path, arguments: tuple[str, ...]) -> None:
    for command in ("drain", "undrain"):
        ran = run("broker", command, *(str(file) if each == "FILE" else each for each in arguments))
        assert ran.code == 2
        assert "name the broker by its ID, or by --self --config FILE" in ran.err


# Levels


@pytest.fixture
def older(monkeypatch: pytest.MonkeyPatch, run: Run) -> Callable[..., list[Ran]]:
    """Run a command against a cluster that an older version has founded."""
    monkeypatch.setattr(memory_metadata, "levels_with_ids_asked_for", list)

    def call(*commands: tuple[str, ...]) -> list[Ran]:
        with AdminServer(brokers=2) as server:
            monkeypatch.setenv("RAFTLOG_BOOTSTRAP", server.bootstrap)
            return [run(*command) for command in commands]

    return call


def test_an_older_cluster_is_upgraded_first(older: Callable[..., list[Ran]], file: Path) -> None:
    refused, shown, dry, upgraded, again, shown_again, drained = older(
        ("broker", "drain", "2"),
        ("cluster", "features", "-o", "json"),
        ("cluster", "features", "upgrade", "--dry-run"),
        ("cluster", "features", "upgrade", "-o", "json"),
        ("cluster", "features", "upgrade"),
        ("cluster", "features"),
        ("broker", "drain", "2"),
    )
    assert refused.code == 1
    assert "raftlog cluster features upgrade" in refused.err
    assert shown.json == [{"feature": "metadata.version", "level": 1, "lowest": 1, "highest": NEWEST}]
    assert dry.out == f"metadata.version would be raised from level 1 to {NEWEST}\n"
    assert upgraded.json == [{"feature": "metadata.version", "from": 1, "to": NEWEST}]
    assert again.out == "nothing to do: every feature is at the highest level that all brokers support\n"
    assert shown_again.table == [
        {"feature": "metadata.version", "level": f"{NEWEST}", "lowest": "1", "highest": f"{NEWEST}"}
    ]
    assert drained.code == 0


def test_a_server_that_stops_itself_waits_also_in_an_older_cluster(older: Callable[..., list[Ran]], file: Path) -> None:
    (ran,) = older(("broker", "drain", "--self", "--config", str(file)))
    assert ran.code == 0
    assert "note: broker 2 hands its leaderships over as it stops" in ran.err
    assert ran.out == "broker 2 is not drained: no partition falls below min.insync.replicas when it stops\n"


# What is led


def part(
    leader: int, isr: list[int], offline: Sequence[int] = (), adding: Sequence[int] = ()
) -> list[TopicDescription]:
    """Return a topic with one partition on 1, 2 and 3."""
    described = PartitionDescription(0, leader, 5, [1, 2, 3], isr, [], list(adding), [], list(offline), [])
    return [TopicDescription("a", bytes(16), False, [described])]


def test_leaderships_move_where_another_replica_could_lead() -> None:
    assert leaderships(part(1, [1, 2, 3]), 1, {1}) == Leaderships([A0], [])
    assert leaderships(part(1, [1], (2, 3)), 1, {1}) == Leaderships([A0], []), (
        "the leadership must be counted, as the other replicas may come back"
    )
    assert leaderships(part(1, [1, 2, 3]), 1, {1, 2, 3}) == Leaderships([], [A0])
    assert leaderships(part(2, [1, 2, 3]), 1, {1}) == Leaderships([], [])
    assert leaderships(part(1, [1], adding=[2, 3]), 1, {1}) == Leaderships([], [A0])


def test_who_has_been_asked_to_let_go_is_waited_for_and_partitions_without_a_leader_for_long_are_not() -> None:
    assert leaderships(part(-1, [1, 2]), 1, {1}) == Leaderships([A0], [])
    assert leaderships(part(-1, [1, 2], (2,)), 1, {1}) == Leaderships([], [])
    assert leaderships(part(-1, [2, 3]), 1, {1}) == Leaderships([], [])


def test_partitions_come_back_that_prefer_the_broker() -> None:
    assert astray(part(1, [1, 2]), 1) == []
    assert astray(part(2, [1, 2]), 1) == [Astray(A0, ready=True)]
    assert astray(part(2, [2]), 1) == [Astray(A0, ready=False)]
    assert astray(part(-1, [1, 2]), 1) == [Astray(A0, ready=False)]
    assert astray(part(1, [1, 2]), 2) == []


def test_many_partitions_are_counted() -> None:
    assert named([A0, A1]) == "a-0, a-1"
    assert named([A0] * 7) == "a-0, a-0, a-0, a-0, a-0 and 2 more"


def _topic(server: AdminServer) -> bytes:
    return server.image.topic_id_by_name["a"]


def test_up_gives_each_server_a_port_for_metrics(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    configured: dict[int, object] = {}

    def configure(cluster: Cluster, node_id: int, config: dict[str, object]) -> None:
        configured[node_id] = config

    def start_all(cluster: Cluster) -> None:
        raise ServerFailed("server 2 ended: cannot serve metrics on 127.0.0.1:9302: address already in use")

    monkeypatch.setattr(Cluster, "configure", configure)
    monkeypatch.setattr(Cluster, "start_all", start_all)
    monkeypatch.setattr(servers, "_taken", lambda ports: f"{len(ports)} ports up to {max(ports)}")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    ran = run("up", "--nodes", "3", "--metrics-port", "9301")
    assert configured == {number: {"metrics.listener": f"127.0.0.1:{9300 + number}"} for number in (1, 2, 3)}
    assert ran.code == 1
    assert "listens at 9 ports up to 9303; choose other ports with --port, 0 for free ones, and with --met" in ran.err
    for wrong in (["--nodes", "2"], ["--metrics-port", "9301"]):
        refused = run("up", *wrong, "--set", "metrics.listener=127.0.0.1:9301")
        assert (refused.code, "give --metrics-port instead" in refused.err) == (2, True)
