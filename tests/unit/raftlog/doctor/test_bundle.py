"""What is in a support bundle, and what is not."""

from __future__ import annotations

import http.server
import json
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from raftlog._core.words import HIDDEN
from raftlog._doctor import bundle, collect
from raftlog._doctor.checks import CHECKS
from raftlog._doctor.picture import Picture, Unanswered
from raftlog._doctor.report import examine
from tests.support import pictures
from tests.support.pictures import ORDERS, broker, config, healthy, lag, node


def files_of(picture: Picture) -> bundle.Files:
    return bundle.files_of(picture, examine(picture, CHECKS), ["first line", "second line"])


def test_everything_that_is_known_is_in_it_as_json() -> None:
    files = files_of(healthy())
    documents = {name: json.loads(content) for name, content in files.items() if name.endswith(".json")}
    assert files["doctor.txt"] == b"first line\nsecond line\n"
    assert documents["cluster.json"]["cluster"]["brokers"][0]["host"] == "b1"
    assert documents["cluster.json"]["quorum"]["voters"][2]["node_id"] == 3
    [orders] = documents["topics.json"]
    assert orders["configs"]["min.insync.replicas"] == {"value": "2", "source": "dynamic_broker"}
    assert orders["partitions"][1]["replicas"] == [2, 3, 1]
    assert documents["replicas.json"][0]["replicas"][0]["log_end_offset"] == 100
    assert documents["nodes/node-2.json"]["hostname"] == "host-2"
    assert documents["groups.json"][0]["partitions"][0]["lag"] == 0
    assert documents["transactions.json"] == {"transactions": [], "hanging": []}
    assert documents["doctor.json"]["findings"] == []


def test_it_can_be_made_of_a_picture_with_nothing_in_it() -> None:
    picture = Picture(taken_at_ms=1, unanswered=[Unanswered("topics", "all", "timed out")])
    assert json.loads(files_of(picture)["topics.json"]) == []
    assert bundle.problems_of(picture) == ["topics: timed out"]


def test_no_secret_and_nothing_of_what_consumers_commit_is_in_it() -> None:
    configs = {
        **node(1).configs,
        "ssl.key.password": config("ssl.key.password", "hunter2"),
        "proxy": config("proxy", "http://joe:hunter2@proxy"),
    }
    picture = healthy(
        nodes={1: node(1, configs=configs)}, lags={"billing": {ORDERS: lag(metadata="hunter2 of the application")}}
    )
    files = files_of(picture)
    assert b"hunter2" not in b"".join(files.values())
    assert json.loads(files["nodes/node-1.json"])["configs"]["ssl.key.password"]["value"] == HIDDEN
    assert "metadata" not in json.loads(files["groups.json"])[0]["partitions"][0]
    assert bundle.log_file(["a", "password=hunter2"]) == f"a\npassword={HIDDEN}\n".encode()


def test_the_page_in_it_names_what_is_there_and_nothing_else() -> None:
    page = bundle.readme("n", "now", {"doctor.txt": b"12345", "nodes/node-1.json": b"1", "nodes/node-2.json": b"2"}, [])
    text = page.decode()
    assert "doctor.txt          the report of raftlog doctor, as text (5 bytes)" in text
    assert "(2 bytes)" in text
    assert "logs/ " not in text
    assert "problems.txt" not in text
    assert "problems.txt" in bundle.readme("n", "now", {}, ["a problem"]).decode()


def test_every_file_is_explained() -> None:
    files = files_of(healthy()) | {"log-dirs.json": b"", "metrics/node-1.txt": b"", "logs/node-1.log": b""}
    text = bundle.readme("n", "now", files, []).decode()
    for name in files:
        directory, slash, _ = name.rpartition("/")
        assert f"  {directory}{slash}" in text if slash else f"  {name}" in text


# What is asked for besides


def test_metrics_that_are_served_on_all_addresses_are_asked_for_at_the_nodes_own() -> None:
    assert collect.metrics_address(node(1), None, None) is None
    assert collect.metrics_address(node(1, metrics_listener="10.0.0.1:9464"), broker(1), None) == ("10.0.0.1", 9464)
    for any_address in ("0.0.0.0:9464", "[::]:9464", ":9464"):
        everywhere = node(1, metrics_listener=any_address)
        assert collect.metrics_address(everywhere, broker(1), None) == ("b1", 9464)
        controller = pictures.quorum(pictures.voter(1, host="c1"))
        assert collect.metrics_address(everywhere, None, controller) == ("c1", 9464)
        assert collect.metrics_address(everywhere, None, None) == ("host-1", 9464)


@pytest.fixture
def metrics() -> Iterator[int]:
    """A server that answers `/metrics` once with figures, and then with an error; its port."""
    answers = [(200, b"figure 1\n"), (503, b"")]

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, body = answers.pop(0)
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_address[1]
        server.shutdown()
        thread.join()


def test_figures_are_read_and_what_is_none_is_an_error(metrics: int) -> None:
    assert collect.read_metrics("127.0.0.1", metrics) == b"figure 1\n"
    with pytest.raises(OSError, match="answers with status 503"):
        collect.read_metrics("127.0.0.1", metrics)


def test_the_end_of_a_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %03d\n" % number for number in range(100)) + b"\xff broken")
    assert collect.last_lines(path, 3) == ["line 098", "line 099", "\\xff broken"]
    assert collect.last_lines(path, 500)[0] == "line 000"
    monkeypatch.setattr(collect, "LOG_BYTES", 40)
    assert collect.last_lines(path, 500)[0] == "line 097", "the first line must be whole, not the end of one"


def test_a_file_of_this_machine_is_read_only_when_the_process_logs_to_it(tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    here = {"hostname": socket.gethostname(), "pid": os.getpid(), "log_file": str(log)}
    assert collect.local_log(node(1, hostname="elsewhere", log_file=str(log))) is None
    assert collect.local_log(node(1, hostname=socket.gethostname(), log_file="")) is None
    with pytest.raises(OSError, match="does not log to"):
        collect.local_log(node(1, **here))
    before = os.dup(2)
    try:
        with log.open("w") as file:
            os.dup2(file.fileno(), 2)
        assert collect.local_log(node(1, **here)) == log
    finally:
        os.dup2(before, 2)
        os.close(before)
