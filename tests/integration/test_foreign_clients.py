"""Clients in Go and Java, written from proto/ and the pages on protocol and format alone, against a real broker.

They are built from source with code that protoc generates, which takes a minute where nothing is cached; so these tests
are among the long ones.
"""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from raftlog import Admin, Consumer, TopicPartition
from raftlog.testing import Cluster

ROOT = Path(__file__).parents[2]
CLIENTS = ROOT / "tests" / "clients"
BUILD_S = 900.0
"""Downloads included."""
RUN_S = 180.0

pytestmark = pytest.mark.long


def run(*command: str | Path, at: Path, within_s: float) -> str:
    """Return a command's output; show it if the command fails."""
    done = subprocess.run(
        [str(part) for part in command], cwd=at, capture_output=True, text=True, timeout=within_s, check=False
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout[-4_000:]}{done.stderr[-4_000:]}"
    return done.stdout


def generate(*options: str, at: Path) -> None:
    """Generate code of the contract with protoc."""
    sources = sorted(str(each) for each in (ROOT / "proto").glob("raftlog/v1/*.proto"))
    protoc = (sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}")
    run(*protoc, *options, *sources, at=at, within_s=RUN_S)


def check(cluster: Cluster, topic: str, shown: str, last: bytes) -> None:
    """Check a client's report, and that the SDK reads its records."""
    seen = json.loads(shown)
    assert seen["values"] == ["hello", "", last.decode()]
    assert seen["refusals"] == ["INVALID_REQUEST RETRY_FINAL", "UNKNOWN_LEADER_EPOCH RETRY_REFRESH"]
    with Consumer(cluster.bootstrap, config=cluster.client_config) as consumer:
        consumer.assign([TopicPartition(topic, 0)])
        consumer.seek(TopicPartition(topic, 0), seen["base_offset"])
        values: list[bytes | None] = []
        while len(values) < 3:
            values += [record.value for record in consumer.poll(1.0)]
    assert values == [b"hello", b"", last]


@pytest.mark.skipif(shutil.which("go") is None, reason="there is no Go here")
def test_a_client_in_go(cluster: Cluster, tmp_path: Path) -> None:
    source = tmp_path / "client"
    shutil.copytree(CLIENTS / "go", source)
    tools = tmp_path / "tools"
    tools.mkdir()
    plugins = ("google.golang.org/protobuf/cmd/protoc-gen-go", "google.golang.org/grpc/cmd/protoc-gen-go-grpc")
    run("go", "build", "-mod=readonly", "-o", f"{tools}{os.sep}", *plugins, at=source, within_s=BUILD_S)
    generate(
        f"--plugin=protoc-gen-go={tools / 'protoc-gen-go'}",
        f"--plugin=protoc-gen-go-grpc={tools / 'protoc-gen-go-grpc'}",
        f"--go_out={source}",
        "--go_opt=module=raftlog",
        f"--go-grpc_out={source}",
        "--go-grpc_opt=module=raftlog",
        at=source,
    )
    run("go", "vet", "-mod=readonly", ".", at=source, within_s=BUILD_S)
    run("go", "build", "-mod=readonly", "-o", tools / "client", ".", at=source, within_s=BUILD_S)
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        admin.create_topic("of-go", 1)
    check(cluster, "of-go", run(tools / "client", cluster.bootstrap, "of-go", at=source, within_s=RUN_S), b"from Go")


@pytest.mark.skipif(
    platform.machine() != "x86_64" or not all(map(shutil.which, ("javac", "java", "mvn"))),
    reason="there is no JDK with Maven here, or another processor than that of protoc's programs on Maven Central",
)
def test_a_client_in_java(cluster: Cluster, tmp_path: Path) -> None:
    """Maven fetches the libraries, protoc and its plugin; grpcio-tools' protoc makes no Java."""
    source, jars, made, classes = (tmp_path / name for name in ("client", "jars", "made", "classes"))
    shutil.copytree(CLIENTS / "java", source)
    for each in (made, classes):
        each.mkdir()
    copy = ("dependency:copy-dependencies", f"-DoutputDirectory={jars}")
    run("mvn", "-q", "-B", *copy, at=source, within_s=BUILD_S)
    (protoc,) = jars.glob("protoc-[0-9]*.exe")
    (plugin,) = jars.glob("protoc-gen-grpc-java-*.exe")
    for each in (protoc, plugin):
        each.chmod(0o755)
    found = importlib.util.find_spec("grpc_tools")
    assert found is not None
    assert found.origin is not None
    known = Path(found.origin).parent / "_proto"  # google/protobuf/descriptor.proto
    options = (f"--plugin=protoc-gen-grpc-java={plugin}", f"--java_out={made}", f"--grpc-java_out={made}")
    sources = sorted(str(each) for each in (ROOT / "proto").glob("raftlog/v1/*.proto"))
    run(protoc, f"-I{ROOT / 'proto'}", f"-I{known}", *options, *sources, at=source, within_s=RUN_S)
    path = ("-cp", f"{classes}{os.pathsep}{jars}/*")
    compiled = ("-Xlint:-options", "-sourcepath", made, "-d", classes)
    run("javac", *path, *compiled, source / "Client.java", at=source, within_s=BUILD_S)
    with Admin(cluster.bootstrap, config=cluster.client_config) as admin:
        admin.create_topic("of-java", 1)
    shown = run("java", *path, "Client", cluster.bootstrap, "of-java", at=source, within_s=RUN_S)
    check(cluster, "of-java", shown, b"from Java")
