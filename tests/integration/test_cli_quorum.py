"""`raftlog up --nodes 3`, `raftlog cluster ...` and `raftlog quorum ...`, as people and scripts use them."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from raftlog.testing import Cluster
from tests.support.command_line import run_here
from tests.support.raftlog_up import raftlog_up
from tests.support.steady import STEADY

WAIT_S = 90.0


def raftlog(*arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(*arguments)


def parsed(*arguments: str) -> Any:
    """Return a command's output, which must come from the controllers' agreed metadata."""
    deadline_s = time.monotonic() + WAIT_S
    while (done := raftlog(*arguments, "--output", "json")).returncode != 0:
        assert "may be out of date" in done.stderr, done.stderr
        assert time.monotonic() < deadline_s, done.stderr
    return json.loads(done.stdout)


def address_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    words = process.stdout.readline().split()
    return words[words.index("at") + 1].rstrip(",")


def wait_until_fenced(
    address: str, broker_id: int, *, fenced: bool, server: subprocess.Popen[bytes] | None = None
) -> None:
    """Wait until a broker is fenced, or is not; `server`: its process, which must go on."""
    deadline_s = time.monotonic() + WAIT_S
    found = not fenced
    while found != fenced and time.monotonic() < deadline_s:
        assert server is None or server.poll() is None, f"the server of broker {broker_id} has ended"
        brokers = parsed("cluster", "describe", "-b", address)["brokers"]
        found = next(broker["fenced"] for broker in brokers if broker["broker_id"] == broker_id)
    assert found == fenced


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(nodes=3, directory=tmp_path_factory.mktemp("three"), config=STEADY) as cluster:
        yield cluster


def test_up_goes_on_when_one_of_three_dies_and_is_the_same_cluster_the_next_time(tmp_path: Path) -> None:
    with raftlog_up("--nodes", "3", "--data", str(tmp_path)) as process:
        address = address_of(process)
        assert len(address.split(",")) == 3
        assert raftlog("topic", "create", "t", "-p", "3", "-b", address).returncode == 0
        [topic] = parsed("topic", "describe", "t", "-b", address)
        assert [len(part["replicas"]) for part in topic["partitions"]] == [3, 3, 3]
        assert {part["replicas"][0] for part in topic["partitions"]} == {1, 2, 3}
        cluster_id = parsed("cluster", "describe", "-b", address)["cluster_id"]
        pid = json.loads((tmp_path / "node-2" / "ready.json").read_bytes())["pid"]
        os.kill(pid, signal.SIGKILL)
        assert process.stderr is not None
        said = ""
        deadline_s = time.monotonic() + WAIT_S
        while "run on" not in said and time.monotonic() < deadline_s:
            said += process.stderr.readline()
        assert "error: server 2 has ended by SIGKILL" in said
        assert "2 of 3 servers run on" in said
        [again] = [line for line in said.splitlines() if line.startswith("to start it again")]
        command = shlex.split(again.partition(": ")[2])
        assert command[1:] == ["server", "--config", str(tmp_path / "node-2" / "server.toml")]
        wait_until_fenced(address, 2, fenced=True)
        with (
            (tmp_path / "restarted.log").open("wb") as log,
            subprocess.Popen([sys.executable, "-P", "-m", *command], stderr=log) as server,
        ):
            wait_until_fenced(address, 2, fenced=False, server=server)
            server.terminate()
            assert server.wait(WAIT_S) == 0
        assert raftlog("topic", "create", "u", "--replication-factor", "2", "-b", address).returncode == 0
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
    with raftlog_up("--nodes", "3", "--data", str(tmp_path)) as process:
        address = address_of(process)
        assert parsed("cluster", "describe", "-b", address)["cluster_id"] == cluster_id
        assert [row["topic"] for row in parsed("topic", "list", "-b", address)] == ["t", "u"]
        process.terminate()
        assert process.wait(WAIT_S) == 0
    with raftlog_up("--nodes", "1", "--data", str(tmp_path)) as process:
        assert "has a cluster of 3 nodes" in process.communicate(timeout=WAIT_S)[1]
    assert process.returncode == 1


def test_the_cluster_and_its_quorum_are_shown_to_people_and_to_programs(three: Cluster) -> None:
    described = parsed("cluster", "describe", "--linearizable", "-b", three.bootstrap)
    assert [broker["broker_id"] for broker in described["brokers"]] == [1, 2, 3]
    assert {"leaderships", "replicas", "broker_epoch", "in_controlled_shutdown"} <= described["brokers"][0].keys()
    for command in (("cluster", "quorum"), ("quorum", "describe")):
        deadline_s = time.monotonic() + WAIT_S
        while True:  # there may be another leader by the second time
            quorum = parsed(*command, "-b", three.bootstrap)
            shown = raftlog(*command, "-b", three.bootstrap).stdout
            if f"leader {quorum['leader_id']} in epoch {quorum['leader_epoch']}" in shown:
                break
            assert time.monotonic() < deadline_s, (quorum, shown)
        assert [voter["node_id"] for voter in quorum["voters"]] == [1, 2, 3]
        assert [seen["broker_id"] for seen in quorum["observers"]] == [1, 2, 3]
        assert "node_id\taddress\tstate\tlog_end_index\tlag\tlast_contact_ms\n1\t127.0.0.1:" in shown


def test_electing_and_unregistering_say_why_not(three: Cluster) -> None:
    assert raftlog("topic", "create", "led", "-b", three.bootstrap).returncode == 0
    balanced = raftlog("cluster", "elect-leaders", "led", "-b", three.bootstrap)
    assert (balanced.returncode, balanced.stderr) == (0, "")
    assert balanced.stdout.startswith("nothing to do: ")
    for command in (("elect-leaders", "none"), ("unregister-broker", "1")):
        done = raftlog("cluster", *command, "-b", three.bootstrap)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert done.stderr.count("\n") == 1


def test_an_id_is_new_every_time() -> None:
    first, second = (raftlog("quorum", "new-id").stdout.strip() for _ in range(2))
    assert uuid.UUID(first) != uuid.UUID(second)


def test_directories_of_stopped_controllers_are_formatted_looked_into_and_changed(tmp_path: Path) -> None:
    def config(node_id: int, voters: str) -> str:
        file = tmp_path / f"server-{node_id}.toml"
        named = ",".join(f"{voter}@127.0.0.1:{9100 + int(voter)}" for voter in voters.split(","))
        file.write_text(
            f'node.id = {node_id}\ncluster.id = "c-1"\nlog.dirs = "{tmp_path / str(node_id)}"\n'
            f'controller.quorum.voters = "{named}"\n'
        )
        return str(file)

    file = config(1, "1,2,3")
    missing = raftlog("quorum", "describe", "--config", file)
    assert (missing.returncode, missing.stderr.count("\n")) == (1, 1)
    done = raftlog("quorum", "format", "--config", file)
    assert done.returncode == 0, done.stderr
    described = parsed("quorum", "describe", "--config", file)
    assert (described["cluster_id"], described["node_id"], described["voters"]) == ("c-1", 1, [1, 2, 3])
    again = raftlog("quorum", "format", "--config", file)
    assert (again.returncode, again.stderr.count("\n")) == (1, 1)
    assert "already" in again.stderr
    changed = parsed("quorum", "set-voters", "--config", file, "--voters", "1,2,4")
    assert (changed["before"], changed["after"]) == ([1, 2, 3], [1, 2, 4])
    refused = raftlog("quorum", "set-voters", "--config", file, "--voters", "7,8,9")
    assert refused.returncode == 1
    broken = raftlog("quorum", "describe", "--config", config(9, "1,2,3"))
    assert broken.returncode == 1
    assert "node.id=9 is not in controller.quorum.voters" in broken.stderr


def test_a_node_that_was_alone_grows_by_the_documented_steps(tmp_path: Path) -> None:
    """The file names all voters before the operator knows the id of the cluster, which is in the directory."""
    file, directory = tmp_path / "server.toml", tmp_path / "data"
    file.write_text(f'node.id = 1\ncluster.id = "c-1"\nlog.dirs = "{directory}"\n')
    assert raftlog("quorum", "format", "--config", str(file)).returncode == 0
    voters = ",".join(f"{voter}@127.0.0.1:{9100 + voter}" for voter in (1, 2, 3))
    file.write_text(f'node.id = 1\nlog.dirs = "{directory}"\ncontroller.quorum.voters = "{voters}"\n')
    assert parsed("quorum", "describe", "--config", str(file))["cluster_id"] == "c-1"
    copies = tmp_path / "copies"
    grown = raftlog("quorum", "set-voters", "--config", str(file), "--voters", "1,2,3", "--copies", str(copies))
    assert (grown.returncode, grown.stderr) == (0, "")
    assert "set cluster.id to c-1 in the configuration of every node" in grown.stdout
    assert "do the same on every other voter" not in grown.stdout
    again = raftlog("quorum", "format", "--config", str(file))
    assert again.returncode == 1
    assert f"`raftlog quorum describe --config {file}` shows it" in again.stderr.replace("FILE", str(file))


def test_quorum_commands_read_environment_variables_as_the_server_does(tmp_path: Path) -> None:
    file = tmp_path / "server.toml"
    file.write_text('log.dirs = "/nowhere"\n')
    described = subprocess.run(
        [sys.executable, "-P", "-m", "raftlog", "quorum", "describe", "--config", str(file)],
        env={**os.environ, "RAFTLOG_NODE_ID": "1", "RAFTLOG_LOG_DIRS": str(tmp_path / "data")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert f"there is no directory {tmp_path / 'data'}" in described.stderr


def test_the_directory_of_a_running_controller_is_left_alone(three: Cluster) -> None:
    file = str(three.directory / "node-1" / "server.toml")
    done = raftlog("quorum", "set-voters", "--config", file, "--voters", "1,2,4")
    assert done.returncode == 1
    assert "in use by a running controller; stop it first" in done.stderr
