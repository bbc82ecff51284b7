"""The command line against a real server: what it prints, its exit codes, its errors."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest

import raftlog
from raftlog.cli import main
from raftlog.testing import Cluster
from tests.support.raftlog_up import raftlog_up

WAIT_S = 90.0
NOT_READY = " is not ready yet; "
ELECTION_MS = 60_000
"""After a start no broker leads for at most this long."""


class Ran(NamedTuple):
    """The result of a command: its exit code and its output."""

    code: int
    out: str
    err: str


Run = Callable[..., Ran]


@pytest.fixture
def run(cluster: Cluster, monkeypatch: pytest.MonkeyPatch, capsysbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command in this process; `stdin` is what it reads."""
    monkeypatch.setenv("RAFTLOG_BOOTSTRAP", cluster.bootstrap)

    def call(*arguments: str, stdin: str | bytes = b"") -> Ran:
        data = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "argv", ["raftlog", *arguments])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))
        with pytest.raises(SystemExit) as ended:
            main()
        printed = capsysbinary.readouterr()
        return Ran(int(ended.value.code or 0), printed.out.decode(), printed.err.decode())

    return call


@pytest.fixture
def topic(run: Run, request: pytest.FixtureRequest) -> str:
    name = f"topic-{abs(hash(request.node.nodeid))}"
    assert run("topic", "create", name, "--partitions", "2").code == 0
    return name


def consumed(run: Run, topic: str, *options: str) -> list[dict[str, object]]:
    ran = run("consume", topic, "--from-beginning", "--no-follow", "--output", "json", *options)
    assert ran.code == 0, ran.err
    return [json.loads(line) for line in ran.out.splitlines()]


def test_a_topics_life(run: Run) -> None:
    assert run("topic", "create", "life", "-p", "2", "-c", "retention.ms=1d").out == "topic life created\n"
    again = run("topic", "create", "life")
    assert (again.code, again.out) == (1, "")
    assert again.err.startswith("error: ")
    assert again.err.count("\n") == 1
    assert run("topic", "create", "life", "--if-not-exists").code == 0
    assert "life\t2\n" in run("topic", "list").out
    [described] = json.loads(run("topic", "describe", "life", "--output", "json").out)
    assert [(found["partition"], found["leader"], found["isr"]) for found in described["partitions"]] == [
        (0, 1, [1]),
        (1, 1, [1]),
    ]
    assert run("topic", "add-partitions", "life", "3").out == "topic life has 3 partitions\n"
    assert len(run("topic", "describe", "life").out.splitlines()) == 4
    assert json.loads(run("topic", "delete", "life", "-o", "json").out) == {"topic": "life", "deleted": True}
    gone = run("topic", "describe", "life")
    assert gone.code == 1
    assert "life" in gone.err


def test_a_topics_settings(run: Run, topic: str) -> None:
    assert run("config", "set", "topic", topic, "retention.ms=1d", "segment.bytes=2MiB").code == 0
    assert f"{topic}\tretention.ms\t86400000\n" in run("config", "list").out
    entries = {entry["key"]: entry for entry in json.loads(run("config", "describe", "topic", topic, "-o", "json").out)}
    assert entries["segment.bytes"]["value"] == "2097152"
    assert "cleanup.policy" not in entries
    assert run("topic", "alter", topic, "--unset", "segment.bytes", "--config", "retention.ms=2d").code == 0
    assert run("config", "unset", "topic", topic, "retention.ms").code == 0
    everything = json.loads(run("config", "describe", "topic", topic, "--all", "-o", "json").out)
    assert {entry["value"] for entry in everything if entry["key"] == "cleanup.policy"} == {"delete"}
    wrong = run("config", "set", "topic", topic, "retention.sm=1d")
    assert wrong.code == 1
    assert "did you mean" in wrong.err
    assert run("config", "set", "topic", topic, "retention.ms").code == 2
    assert run("config", "describe", "broker", "one").code == 2
    assert json.loads(run("config", "describe", "broker", "1", "--all", "-o", "json").out)


def test_options_by_kafkas_names(run: Run, topic: str, cluster: Cluster, tmp_path: Path) -> None:
    settings = tmp_path / "client.toml"
    settings.write_text('"client.id" = "c"\n')
    where = ["--bootstrap-server", cluster.bootstrap, "--command-config", str(settings)]
    assert run("produce", topic, *where, stdin="a\nb\n").code == 0
    assert (
        run("consume", topic, "--from-beginning", "--max-messages", "1", f"--bootstrap-server={cluster.bootstrap}").code
        == 0
    )
    assert "bootstrap-server" not in run("consume", "--help").out


def test_the_servers_keys_are_listed_without_a_server(run: Run) -> None:
    keys = {key["key"]: key for key in json.loads(run("config", "server-keys", "-o", "json").out)}
    assert keys["log.dirs"]["doc"]
    assert keys["num.partitions"]["default"] == "1"


def test_the_cluster_is_described(run: Run, cluster: Cluster) -> None:
    described = json.loads(run("cluster", "describe", "--output", "json").out)
    [broker] = described["brokers"]
    assert f"{broker['host']}:{broker['port']}" == cluster.bootstrap
    assert described["controller_id"] == 1
    assert described["cluster_id"] in run("cluster", "describe").out


def test_lines_go_in_and_come_out(run: Run, topic: str) -> None:
    ran = run("produce", topic, "--key-separator", ":", "-z", "zstd", stdin="ada:1\ngrace:ünï\n")
    assert ran.code == 0, ran.err
    assert "2 records" in ran.err
    records = {record["key"]: record["value"] for record in consumed(run, topic)}
    assert records == {"ada": "1", "grace": "ünï"}
    text = run("consume", topic, "--from-beginning", "--no-follow", "--print-key", "--print-offset")
    assert sorted(line.split("\t")[1:] for line in text.out.splitlines()) == [["ada", "1"], ["grace", "ünï"]]


def test_what_is_not_committed_is_read_on_request(run: Run, topic: str, cluster: Cluster) -> None:
    with raftlog.Producer(cluster.bootstrap, transactional_id="cli") as producer:
        producer.begin_transaction()
        producer.send(topic, b"open").result(WAIT_S)
        assert run("consume", topic, "--from-beginning", "--no-follow").out == ""
        seen = run("consume", topic, "--from-beginning", "--no-follow", "--isolation-level", "read_uncommitted")
        assert seen.out.split() == ["open"]
        producer.commit_transaction()
    deadline_s = time.monotonic() + WAIT_S
    while not (seen := run("consume", topic, "--from-beginning", "--no-follow")).out:  # where a marker is late
        assert time.monotonic() < deadline_s, seen
    assert seen.out.split() == ["open"]
    assert run("consume", topic, "--isolation-level", "serializable").code == 2


def test_json_lines_keep_everything_from_one_topic_to_the_next(run: Run, topic: str) -> None:
    lines: list[dict[str, object]] = [
        {"partition": 1, "key": "k", "value": "v", "headers": [["h", "1"], ["h", None]], "timestamp": 1234},
        {"partition": 1, "key": None, "value": None, "timestamp": 5},
        {"partition": 1, "key_base64": "/w==", "value_base64": "AP8=", "timestamp": 6},
    ]
    assert run("produce", topic, "-f", "json", stdin="\n".join(map(json.dumps, lines))).code == 0
    first = run("consume", topic, "--from-beginning", "--no-follow", "--output", "json").out
    wanted = [{"topic": topic, "offset": offset, **line} for offset, line in enumerate(lines)]
    assert [json.loads(line) for line in first.splitlines()] == wanted
    assert run("topic", "create", topic + "-copy", "-p", "2").code == 0
    assert run("produce", topic + "-copy", "-f", "json", stdin=first).code == 0
    assert [record["value"] for record in consumed(run, topic + "-copy") if "value" in record] == ["v", None]


def test_files_by_their_ending_and_raw_output(run: Run, topic: str, tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text("who,what\nada,engine\ngrace,compiler\n")
    ran = run("produce", topic, str(tmp_path / "x.csv"), "--key-column", "who", "--value-column", "what", "-o", "json")
    assert json.loads(ran.out)["records"] == 2
    assert {record["key"]: record["value"] for record in consumed(run, topic)} == {"ada": "engine", "grace": "compiler"}
    raw = run("consume", topic, "--from-beginning", "--no-follow", "--output", "raw").out
    assert sorted([raw, "enginecompiler"])[0] in ("enginecompiler", "compilerengine")
    missing = run("produce", topic, str(tmp_path / "none.csv"))
    assert missing.code == 1
    assert "none.csv" in missing.err


def test_where_consuming_begins_and_ends(run: Run, topic: str) -> None:
    lines = "\n".join(json.dumps({"partition": 0, "value": str(number)}) for number in range(10))
    assert run("produce", topic, "-f", "json", stdin=lines).code == 0
    assert run("consume", topic, "--no-follow").out == ""
    assert run("consume", topic, "--timeout", "0.3").out == ""
    assert run("consume", topic, "-p", "0", "--offset", "7", "--no-follow").out == "7\n8\n9\n"
    assert run("consume", topic, "--from-beginning", "--max", "3").out == "0\n1\n2\n"
    assert run("consume", topic, "-p", "1", "--from-beginning", "--no-follow").out == ""
    assert run("consume", topic, "-p", "5", "--from-beginning").code == 1
    assert run("consume", topic, "--offset", "3", "--from-beginning").code == 2


def test_log_dump_reads_the_servers_files_and_finds_damage(
    run: Run, topic: str, cluster: Cluster, tmp_path: Path
) -> None:
    for number in range(3):
        line = json.dumps({"partition": 0, "key": "k", "value": f"value {number}", "headers": {"a": "b"}})
        assert run("produce", topic, "-f", "json", stdin=line).code == 0
    directory = cluster.log_dir(1) / f"{topic}-0"
    ran = run("log", "dump", str(directory), "--records", "-o", "json")
    assert ran.code == 0, ran.err
    segments = [json.loads(line) for line in ran.out.splitlines()]
    contents = [record for segment in segments for batch in segment["batches"] for record in batch["contents"]]
    assert [record["value"] for record in contents] == ["value 0", "value 1", "value 2"]
    assert contents[0]["headers"] == [["a", "b"]]
    assert "3 batches, 3 records, 0 problems" in ran.err
    [log] = directory.glob("*.log")
    damaged = bytearray(log.read_bytes())
    damaged[-1] ^= 1
    (tmp_path / log.name).write_bytes(damaged)
    (tmp_path / "server.log").write_text("no segment\n")
    ran = run("log", "dump", str(tmp_path))
    assert ran.code == 1
    assert f"error: {tmp_path / log.name}: " in ran.err
    assert "checksum mismatch" in ran.err
    assert "1 segment, 3 batches, 3 records, 1 problem\n" in ran.err


def test_wrong_command_lines_end_with_2_and_help_with_0(run: Run, tmp_path: Path) -> None:
    assert run("topic", "creat").code == 2
    assert run("produce", "t", "--key-column", "x", stdin="").code == 2
    assert run("log", "dump", str(tmp_path)).code == 2
    assert run("topic", "alter", "t").code == 2
    for command in ([], ["topic"], ["produce"], ["consume"], ["log", "dump"], ["up"], ["server"]):
        ran = run(*command, "--help")
        assert ran.code == 0
        assert "Usage" in ran.out
    assert run("--version").out.startswith("raftlog ")
    assert "<bool>" not in run("topic", "create", "--help").out
    told = " ".join(run("produce", "--help").out.replace("│", " ").split())
    assert "Every column is text" in told
    assert "key_base64" in told


def test_nobody_there_is_one_line_and_exit_code_1(run: Run) -> None:
    ran = run("topic", "list", "--bootstrap", "127.0.0.1:1")
    assert (ran.code, ran.out, ran.err.count("\n")) == (1, "", 1)
    assert ran.err.startswith("error: ")
    assert "127.0.0.1:1" in ran.err


def test_a_reader_that_leaves_is_no_error(run: Run, topic: str, cluster: Cluster) -> None:
    assert run("produce", topic, stdin="line\n" * 50_000).code == 0
    command = f"{sys.executable} -P -m raftlog.cli consume {topic} --from-beginning | head -n 1"
    environment = {**os.environ, "RAFTLOG_BOOTSTRAP": cluster.bootstrap}
    done = subprocess.run(command, shell=True, capture_output=True, text=True, env=environment, timeout=180, check=True)
    assert (done.stdout, done.stderr) == ("line\n", "")
    piped = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, env=environment, timeout=180, check=False
    )
    assert piped.returncode == 0


def test_the_server_command_becomes_the_server(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text(f'listeners = "127.0.0.1:0"\nlog.dirs = "{tmp_path / "data"}"\nnode.id = 1\n')
    command = [sys.executable, "-P", "-m", "raftlog.cli", "server", "--config", str(config)]
    wrong = subprocess.run([*command, "--set", "node.idd=1"], capture_output=True, text=True, check=False)
    assert wrong.returncode == 2
    assert "node.id" in wrong.stderr
    ready = tmp_path / "ready.json"
    process = subprocess.Popen([*command, "--ready-file", str(ready)], stderr=subprocess.PIPE, text=True)
    try:
        while not ready.exists():
            assert process.poll() is None, process.communicate()
            time.sleep(0.01)
        assert json.loads(ready.read_text())["pid"] == process.pid
        process.send_signal(signal.SIGTERM)
        assert process.wait(WAIT_S) == 0
    finally:
        process.kill()
        process.communicate()


def test_a_missing_argument_is_named(run: Run) -> None:
    for command, argument in (
        (["produce"], "TOPIC"),
        (["config", "set"], "topic|broker|broker-logger"),
        (["log", "dump"], "FILE|DIR"),
    ):
        ran = run(*command)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1)
        assert ran.err.startswith(f"error: Missing argument '{argument}'")


def test_a_value_of_the_wrong_kind_is_told_in_words(run: Run) -> None:
    word = run("topic", "create", "t", "--partitions", "many")
    assert (word.code, word.err.count("\n")) == (2, 1)
    assert "write a whole number" in word.err
    small = run("topic", "create", "t", "--partitions", "0")
    assert small.code == 2
    assert "Input should" not in small.err
    assert "Value error" not in small.err


def test_an_address_without_a_port_is_a_wrong_command_line(run: Run) -> None:
    for command in (["topic", "list"], ["consume", "t"], ["produce", "t"]):
        ran = run(*command, "-b", "127.0.0.1")
        assert (ran.code, ran.err.count("\n")) == (2, 1)
        assert "'127.0.0.1' is not host:port" in ran.err


def test_csv_goes_in_as_it_stands_and_bytes_are_counted(run: Run, topic: str) -> None:
    ran = run("produce", topic, "-f", "csv", "--key-column", "zip", "--value-column", "n", stdin="zip,n\n00501,1.0\n")
    assert f"1 record, 8 bytes to {topic} in" in ran.err
    [record] = consumed(run, topic)
    assert (record["key"], record["value"]) == ("00501", "1.0")


def test_a_failing_produce_says_where_and_how_much_was_sent(run: Run, topic: str) -> None:
    bad_line = run("produce", topic, "-f", "json", stdin='{"value": "a"}\n{"value": "b"}\nnope\n')
    assert bad_line.code == 1
    assert "line 3 is not JSON" in bad_line.err
    assert "2 records were sent before" in bad_line.err
    refused = run("produce", topic, "-f", "json", stdin='\n{"value": "c"}\n{"partition": 7}\n{"value": "d"}\n')
    assert refused.code == 1
    assert "error: line 3: " in refused.err
    assert "no partition 7; 1 record was sent before" in refused.err
    assert sorted(str(record["value"]) for record in consumed(run, topic)) == ["a", "b", "c"]


def test_an_empty_input_still_needs_the_topic_and_the_cluster(run: Run) -> None:
    ran = run("produce", "not-there", stdin="")
    assert (ran.code, "not-there" in ran.err) == (1, True)
    assert run("produce", "t", "-b", "127.0.0.1:1", "-c", "max.block.ms=500", stdin="").code == 1


def test_an_offset_that_is_not_there_is_an_error(run: Run, topic: str) -> None:
    assert run("produce", topic, "-f", "json", stdin='{"partition": 0, "value": "a"}').code == 0
    assert run("consume", topic, "-p", "0", "--offset", "1", "--no-follow").code == 0
    ran = run("consume", topic, "-p", "0", "--offset", "5", "--no-follow")
    assert (ran.code, ran.out) == (1, "")
    assert f"{topic}-0 has offsets 0 to 1, not 5" in ran.err


def test_where_logs_lie_and_where_they_begin_after_a_deletion(run: Run, topic: str, cluster: Cluster) -> None:
    lines = "".join(f'{{"partition": {number % 2}, "value": "v{number}"}}\n' for number in range(6))
    assert run("produce", topic, "-f", "json", stdin=lines).code == 0
    [directory] = json.loads(run("broker", "log-dirs", "1", "--topic", topic, "-o", "json").out)
    assert (directory["path"], directory["error"]) == (str(cluster.log_dir(1)), None)
    assert [(part["partition"], part["log_end_offset"], part["lag"]) for part in directory["partitions"]] == [
        (0, 3, 0),
        (1, 3, 0),
    ]
    table = run("broker", "log-dirs", "--output", "tsv")
    assert f"\t{topic}\t0\t{directory['partitions'][0]['size_bytes']}\t0\t1\n" in table.out
    assert table.err.startswith(f"broker 1: {cluster.log_dir(1)}: ")
    assert run("broker", "log-dirs", "9").err == "error: there is no broker 9; the cluster has 1\n"
    assert f"{topic}\t1\t2\n" in run("topic", "delete-records", topic, "-p", "1", "--before-offset", "2").out
    refused = run("topic", "delete-records", topic, "-p", "1", "--before-offset", "4", "-o", "json")
    assert (refused.code, list(json.loads(refused.out)["refused"])) == (1, [f"{topic}-1"])
    assert f"{topic}-1: cannot delete up to 4, the high watermark is 3" in refused.err
    internal = run("topic", "delete-records", "__consumer_offsets", "-p", "0", "--before-offset", "0")
    assert internal.code == 1
    found = json.loads(run("topic", "offsets", topic, "--time", "earliest", "-o", "json").out)
    assert [each["offset"] for each in found] == [0, 2]
    assert sorted(run("consume", topic, "--last", "2", "--no-follow").out.split()) == ["v2", "v4", "v5"]


def test_no_key_is_not_the_text_null(run: Run, topic: str) -> None:
    assert run("produce", topic, "-f", "json", stdin='{"value": "a"}\n{"key": "null", "value": "b"}').code == 0
    text = run("consume", topic, "--from-beginning", "--no-follow", "--print-key").out
    assert sorted(text.splitlines()) == ["null\tb", "␀\ta"]


def test_an_ascii_terminal_gets_escapes(run: Run, topic: str, cluster: Cluster) -> None:
    assert run("produce", topic, stdin="ünï").code == 0
    environment = {**os.environ, "RAFTLOG_BOOTSTRAP": cluster.bootstrap, "PYTHONIOENCODING": "ascii"}
    command = [sys.executable, "-P", "-m", "raftlog", "consume", topic, "--from-beginning", "--no-follow"]
    text = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert text.stdout == "\\xfcn\\xef\n"
    as_json = subprocess.run([*command, "-o", "json"], capture_output=True, text=True, env=environment, check=True)
    assert json.loads(as_json.stdout)["value"] == "ünï"


def test_broker_settings_for_all_and_those_that_need_a_restart(run: Run) -> None:
    for broker in ("1", "default"):
        fixed = run("config", "set", "broker", broker, "num.partitions=3")
        assert fixed.code == 1
        assert "num.partitions cannot change while a server runs" in fixed.err
    assert run("config", "set", "broker", "default", "log.retention.ms=3d").code == 0
    assert "log.retention.ms\t259200000" in run("config", "describe", "broker", "default").out
    assert run("config", "unset", "broker", "default", "log.retention.ms").code == 0
    assert "did you mean" in run("config", "set", "broker", "1", "log.retention.sm=1").err


def test_files_that_are_not_there_are_told_in_words(run: Run, topic: str, tmp_path: Path) -> None:
    assert run("produce", topic, str(tmp_path / "x.csv")).err == (
        f"error: there is no {tmp_path / 'x.csv'}; check the path, and that its directory exists\n"
    )
    assert "is a directory; name a file" in run("produce", topic, str(tmp_path)).err


def test_tables_write_booleans_as_json_does(run: Run) -> None:
    assert "\tfalse\t" in run("cluster", "quorum").out


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


def next_note(process: subprocess.Popen[str]) -> str:
    """Return the next line on standard error; without those that tell of a start that takes long."""
    assert process.stderr is not None
    while NOT_READY in (line := process.stderr.readline()):
        pass
    return line


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGTERM, signal.SIGINT])
def test_up_cleans_up_after_every_signal_that_ends_it(number: signal.Signals) -> None:
    with raftlog_up() as process:
        words = first_line(process).split()
        directory = Path(words[words.index("in") + 1])
        assert directory.exists()
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    assert not directory.exists()


def test_a_second_up_leaves_the_files_of_the_first_alone(tmp_path: Path) -> None:
    with raftlog_up("--data", str(tmp_path)) as process:
        try:
            assert "raftlog is up" in first_line(process)
            files = {name: (tmp_path / "node-1" / name).read_bytes() for name in ("server.toml", "ready.json")}
            with raftlog_up("--data", str(tmp_path), "--set", "num.partitions=3") as second:
                _, errors = second.communicate(timeout=WAIT_S)
            assert second.returncode == 1
            assert f"is in use: process {process.pid} runs a server there" in errors
            assert errors.count("\n") == 1
            assert {name: (tmp_path / "node-1" / name).read_bytes() for name in files} == files
        finally:
            process.terminate()


def test_up_says_which_of_its_ports_is_in_use(cluster: Cluster) -> None:
    taken = int(cluster.bootstrap.rpartition(":")[2])
    with raftlog_up("--nodes", "2", "--port", str(taken - 1)) as process:
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    *notes, error = errors.splitlines()
    assert all(NOT_READY in note for note in notes), "before the error only a long start is told of"
    found, advice = error.split("; ")
    told, addresses = found.split(" listens at ")
    assert told == "error: another process, perhaps another cluster,"
    assert advice.startswith("choose other ports with --port")
    assert f"127.0.0.1:{taken}" in addresses.split(", "), "beside it may stand what other tests hold"


def test_up_says_how_a_server_ended(tmp_path: Path) -> None:
    with raftlog_up("--data", str(tmp_path)) as process:
        first_line(process)
        os.kill(json.loads((tmp_path / "node-1" / "ready.json").read_bytes())["pid"], signal.SIGKILL)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 1
    assert "error: server 1 has ended by SIGKILL" in errors


def test_insecure_opens_a_listener_beyond_loopback(tmp_path: Path) -> None:
    everywhere = ["--set", "listeners=0.0.0.0:0", "--set", "advertised.listeners=127.0.0.1:0"]
    with raftlog_up("--data", str(tmp_path), *everywhere) as process:
        assert "--insecure" in process.communicate(timeout=WAIT_S)[1]
    with raftlog_up("--data", str(tmp_path), *everywhere, "--insecure") as process:
        assert "raftlog is up" in first_line(process)
        process.terminate()
    config = tmp_path / "server.toml"
    config.write_text(f'listeners = "0.0.0.0:0"\nlog.dirs = "{tmp_path / "data"}"\nnode.id = 1\n')
    command = [sys.executable, "-P", "-m", "raftlog", "server", *everywhere, "--config", str(config)]
    ready = tmp_path / "ready.json"
    with subprocess.Popen([*command, "--insecure", "--ready-file", str(ready)], stderr=subprocess.DEVNULL) as served:
        deadline = time.monotonic() + WAIT_S
        while not ready.exists() and served.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        served.terminate()
    assert ready.exists()


def test_the_demo_refuses_arguments_that_it_does_not_have() -> None:
    command = [sys.executable, "-m", "raftlog_demo"]
    usage = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert usage.stdout.startswith("usage: ./dev demo")
    assert subprocess.run([*command, "--fast"], capture_output=True, check=False).returncode == 2


def test_a_server_that_was_stopped_is_no_error(tmp_path: Path) -> None:
    with raftlog_up("--nodes", "2", "--data", str(tmp_path)) as process:
        first_line(process)
        ready = {node: tmp_path / f"node-{node}" / "ready.json" for node in (1, 2)}
        os.kill(json.loads(ready[2].read_bytes())["pid"], signal.SIGTERM)
        assert next_note(process) == "server 2 has stopped\n"
        assert next_note(process).startswith("to start it again, in another terminal: raftlog server --config")
        assert next_note(process) == "1 of 2 servers run on\n"
        assert not ready[2].exists(), (
            "ready.json of the stopped server must be gone, as another process may get its pid"
        )
        assert ready[1].exists()
        os.kill(json.loads(ready[1].read_bytes())["pid"], signal.SIGTERM)
        _, errors = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0
    assert "error" not in errors
    assert not ready[1].exists()


def test_a_server_that_somebody_starts_again_counts(tmp_path: Path) -> None:
    with raftlog_up("--nodes", "2", "--data", str(tmp_path)) as process:
        first_line(process)
        os.kill(json.loads((tmp_path / "node-2" / "ready.json").read_bytes())["pid"], signal.SIGTERM)
        said = [next_note(process) for _ in range(3)]
        assert said[-1] == "1 of 2 servers run on\n"
        command = [sys.executable, "-P", "-m", "raftlog", "server", "--config", str(tmp_path / "node-2/server.toml")]
        with subprocess.Popen(command, stderr=subprocess.DEVNULL) as by_hand:
            try:
                assert next_note(process) == "server 2 runs again; it was started by hand\n"
                assert next_note(process) == "all 2 servers run\n"
                process.send_signal(signal.SIGINT)
                _, errors = process.communicate(timeout=WAIT_S)
                assert errors == "stopping\nserver 2 runs on, started by hand: stop it in its terminal\n"
                assert process.returncode == 0
                assert by_hand.poll() is None
            finally:
                by_hand.kill()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_up_is_stopped_while_it_starts(tmp_path: Path, number: signal.Signals, code: int) -> None:
    no_leader_yet = f"controller.quorum.election.timeout.ms={ELECTION_MS}"
    with raftlog_up("--nodes", "3", "--data", str(tmp_path), "--set", no_leader_yet) as process:
        while not (tmp_path / "node-1" / "server.log").exists():
            assert process.poll() is None
            time.sleep(0.01)
        process.send_signal(number)
        sent = time.monotonic()
        printed, _ = process.communicate(timeout=WAIT_S)
    assert time.monotonic() - sent < ELECTION_MS / 1000 / 2, (
        "`raftlog up` must end at once after a signal, without waiting until all servers have started"
    )
    assert (process.returncode, printed) == (code, "")


INTERRUPTED_IMPORT = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
sys.argv = ["raftlog", "topic", "list"]
from raftlog.cli import main
main()
"""


def test_ctrl_c_while_everything_is_imported_leaves_no_traceback() -> None:
    ran = subprocess.run([sys.executable, "-c", INTERRUPTED_IMPORT], capture_output=True, check=False, timeout=WAIT_S)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, b"", b"")


INTERRUPTED_SERVER = """
import os, signal, sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "uvloop" and "broker" in sys.orig_argv:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Finder())
"""


def test_ctrl_c_while_a_server_imports_its_packages_leaves_no_traceback(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTED_SERVER)
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-P", "-m", "raftlog", "server", "--set", "node.id=1", "--set", f"log.dirs={tmp_path}"]
    ran = subprocess.run(
        [*command, "--set", "listeners=127.0.0.1:0"],
        capture_output=True,
        check=False,
        timeout=WAIT_S,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (-signal.SIGINT, b"", b"")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_no_ready_file_stays_behind(tmp_path: Path, number: signal.Signals) -> None:
    with raftlog_up("--data", str(tmp_path)) as process:
        first_line(process)
        process.send_signal(number)
        assert process.wait(WAIT_S) == 0
    assert not (tmp_path / "node-1" / "ready.json").exists()
