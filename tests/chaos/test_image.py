"""The image by itself: its user, that it writes only into its data, and that its command line works."""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator

import pytest

import raftlog
from tests.chaos.host import share_of_processors
from tools.docker import Image

FLAGS = ("--read-only", "--cap-drop", "ALL", "--security-opt", "no-new-privileges")
SERVER = {
    "RAFTLOG_NODE_ID": "1",
    "RAFTLOG_LOG_DIRS": "/var/lib/raftlog/logs",
    "RAFTLOG_LISTENERS": "127.0.0.1:9092",
    "RAFTLOG_LOG_FORMAT": "json",
}


def docker(*arguments: str, stdin: str = "", code: int = 0) -> str:
    """Run docker and return what it printed; `code` is what it is to end with."""
    done = subprocess.run(["docker", *arguments], input=stdin, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def start(image: Image) -> str:
    """Start a node of one, on a root file system that cannot be written, and wait until it serves."""
    variables = [part for key, value in SERVER.items() for part in ("--env", f"{key}={value}")]
    share = [f"--{name.replace('_', '-')}={value}" for name, value in share_of_processors().items()]
    container = docker("run", "--detach", *FLAGS, *share, *variables, image.tag, "server").strip()
    deadline_s = time.monotonic() + 180
    while subprocess.run(["docker", "exec", container, "raftlog", "topic", "list"], capture_output=True).returncode:
        assert time.monotonic() < deadline_s, docker("logs", container)
        time.sleep(0.2)
    return container


@pytest.fixture(scope="module")
def server(image: Image) -> Iterator[str]:
    """A node."""
    container = start(image)
    try:
        yield container
    finally:
        docker("rm", "--force", "--volumes", container)


def run(server: str, *arguments: str, stdin: str = "") -> str:
    """Run the command line in the server's container."""
    return docker("exec", "--interactive", server, "raftlog", *arguments, stdin=stdin)


def test_records_go_in_and_come_out(server: str) -> None:
    run(server, "topic", "create", "smoke", "--partitions", "2")
    run(server, "produce", "smoke", stdin="one\ntwo\nthree\n")
    found = run(server, "consume", "smoke", "--from-beginning", "--no-follow")
    assert sorted(found.split()) == ["one", "three", "two"]


def test_nothing_runs_as_root(server: str) -> None:
    assert docker("exec", server, "id", "-u").strip() == "10001"
    owners = docker("exec", server, "sh", "-c", "stat -c %u /proc/[0-9]*")
    assert set(owners.split()) == {"10001"}


def test_only_data_can_be_written(server: str) -> None:
    shell = (
        "for d in / /etc /opt/raftlog /usr/bin; do touch $d/x 2>/dev/null && echo $d; done; touch /var/lib/raftlog/x"
    )
    assert docker("exec", server, "sh", "-c", shell) == ""


def test_the_path_holds_nothing_that_others_can_write(server: str) -> None:
    told = docker("exec", server, "sh", "-c", "echo $PATH")
    folders = told.strip().split(":")
    assert all(folder.startswith("/") for folder in folders), told
    shell = "for d in $(echo $PATH | tr : ' '); do [ -w $d ] && echo $d; done; true"
    assert docker("exec", server, "sh", "-c", shell) == ""


def test_a_server_stops_cleanly_when_told_to(image: Image) -> None:
    container = start(image)
    try:
        docker("stop", "--time", "120", container)
        assert docker("inspect", "--format", "{{.State.ExitCode}}", container).strip() == "0"
    finally:
        docker("rm", "--force", "--volumes", container)


def test_a_missing_setting_is_named(image: Image) -> None:
    done = subprocess.run(
        ["docker", "run", "--rm", *FLAGS, image.tag, "server"], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "node.id" in done.stderr


def test_labels_say_what_it_is(image: Image) -> None:
    labels = json.loads(docker("image", "inspect", "--format", "{{json .Config.Labels}}", image.tag))
    assert labels["org.opencontainers.image.version"] == raftlog.__version__
    materials = json.loads(docker("run", "--rm", *FLAGS, "--entrypoint", "cat", image.tag, labels["org.raftlog.sbom"]))
    names = {each["name"].lower() for each in materials["components"]}
    assert names >= {"raftlog", "grpcio", "pyarrow", "pysyncobj"}
    assert not names & {"pyspark", "pytest", "hatchling"}, "the image must contain only what a node needs"
