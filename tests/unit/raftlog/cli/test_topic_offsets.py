"""Commands about offsets and records of topics on a cluster in memory, and the questions before a deletion."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import typer

from raftlog import Admin, Record, TopicPartition
from raftlog.cli import main
from raftlog.cli.output import Output, print_rows
from raftlog.cli.records.consume import format_parts
from raftlog.errors import OffsetOutOfRange, RaftlogError
from raftlog.format import Columns, encode_batch
from tests.support.command_line import Ran, Run
from tests.support.fake_broker import FakeCluster
from tests.unit.raftlog.cli.test_output import Screen

FIRST_MS = 1_700_000_000_000


@pytest.fixture
def server() -> Iterator[FakeCluster]:
    """Topic `a`: ten records a second apart in partition 0, none in partition 1. Topic `b`: three records."""
    with FakeCluster(nodes=2) as cluster:
        cluster.create_topic("a", 2)
        cluster.create_topic("b", 1)
        for topic, count in (("a", 10), ("b", 3)):
            for number in range(count):
                columns = Columns(pa.array([b"%s%d" % (topic.encode(), number)], pa.binary()))
                cluster.append(topic, encode_batch(columns, FIRST_MS + 1_000 * number))
        yield cluster


@pytest.fixture
def run(server: FakeCluster, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> Run:
    """Run a command in this process, with bytes on its standard output."""
    monkeypatch.setenv("RAFTLOG_BOOTSTRAP", server.bootstrap)

    def call(*arguments: str) -> Ran:
        monkeypatch.setattr(sys, "argv", ["raftlog", *arguments])
        monkeypatch.setattr(sys, "stdin", io.StringIO())
        with pytest.raises(SystemExit) as ended:
            main()
        sys.stdout.flush()
        printed = capfdbinary.readouterr()
        return Ran(int(ended.value.code or 0), printed.out.decode(), printed.err.decode())

    return call


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ("latest", ["10", "0", "3"]),
        ("-1", ["10", "0", "3"]),
        ("earliest", ["0", "0", "0"]),
        ("-2", ["0", "0", "0"]),
        (str(FIRST_MS + 2_000), ["2", "-", "2"]),
        ("2023-11-14T22:13:25Z", ["5", "-", "-"]),
    ],
)
def test_offsets_by_name_and_by_time(run: Run, time: str, expected: list[str]) -> None:
    ran = run("topic", "offsets", "--time", time, "--output", "tsv")
    assert [row["offset"] for row in ran.table] == expected
    assert [(row["topic"], row["partition"]) for row in ran.table] == [("a", "0"), ("a", "1"), ("b", "0")]


def test_offsets_of_some_partitions(run: Run) -> None:
    found = run("topic", "offsets", "a", "-p", "0", "--time", str(FIRST_MS), "-o", "json").json
    assert found == [{"topic": "a", "partition": 0, "offset": 0, "timestamp": FIRST_MS}]
    assert "topic b has no partition 1; it has 1, from 0" in run("topic", "offsets", "b", "-p", "1").err
    wrong = run("topic", "offsets", "a", "--time", "yesterday")
    assert (wrong.code, "write latest, earliest, max-timestamp, or a time" in wrong.err) == (2, True)


def test_partitions_of_a_silent_leader_are_missing_and_the_others_shown(
    server: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("raftlog._client.admin._LOOK_UP_PATIENCE_S", 0.5)
    monkeypatch.setattr("raftlog._client.metadata.STRAGGLER_GRACE_S", 0.1)
    server.move_leader("a", 1, 2)
    server.move_leader("a", 0, 1)
    server.move_leader("b", 0, 1)
    server.kill(2)
    ran = run("topic", "offsets", "a", "b")
    assert ran.code == 1
    assert [row["offset"] for row in ran.table] == ["10", "3"]
    assert "note: the list of offsets may be incomplete: " in ran.err


def test_records_are_deleted_below_an_offset_in_one_partition_or_in_all(run: Run, tmp_path: Path) -> None:
    assert run("topic", "delete-records", "a", "-p", "0", "--before-offset", "4").table == [
        {"topic": "a", "partition": "0", "log_start_offset": "4"}
    ]
    assert [row["offset"] for row in run("topic", "offsets", "a", "--time", "earliest").table] == ["4", "0"]
    several = run("topic", "delete-records", "a", "--before-offset", "5")
    assert (several.code, "needs --partition: topic a has 2 partitions" in several.err) == (2, True)
    assert [row["log_start_offset"] for row in run("topic", "delete-records", "a", "--all").table] == ["10", "0"]
    kafkas = tmp_path / "offsets.json"
    kafkas.write_text(json.dumps({"partitions": [{"topic": "b", "partition": 0, "offset": 2}], "version": 1}))
    assert run("topic", "delete-records", "--offset-json-file", str(kafkas)).table[0]["log_start_offset"] == "2"
    for text in ("[]", '{"partitions": [{"topic": "b"}]}', "nope"):
        kafkas.write_text(text)
        assert run("topic", "delete-records", "--offset-json-file", str(kafkas)).code == 2
    for wrong in (["a"], ["a", "--all", "--before-offset", "1"], [], ["a", "--offset-json-file", str(kafkas)]):
        assert run("topic", "delete-records", *wrong).code == 2


def test_a_refused_partition_does_not_stop_the_others(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    delete = Admin.delete_records

    def refuse(admin: Admin, before: dict[TopicPartition, int]) -> dict[TopicPartition, int]:
        if TopicPartition("a", 0) in before:
            raise OffsetOutOfRange("a-0: cannot delete up to 11, the high watermark is 10")
        return delete(admin, before)

    monkeypatch.setattr(Admin, "delete_records", refuse)
    ran = run("topic", "delete-records", "a", "--all", "-o", "json")
    assert (ran.code, ran.json) == (
        1,
        {
            "partitions": [{"topic": "a", "partition": 1, "log_start_offset": 0}],
            "refused": {"a-0": "a-0: cannot delete up to 11, the high watermark is 10"},
        },
    )
    assert ran.err == "error: no record was deleted: a-0: cannot delete up to 11, the high watermark is 10\n"


@pytest.mark.parametrize(
    ("options", "values"),
    [
        (["--last", "2"], ["a8", "a9", "b1", "b2"]),
        (["--last", "100", "--partition", "0"], [*(f"a{each}" for each in range(10)), "b0", "b1", "b2"]),
        (["--from-time", str(FIRST_MS + 7_500)], ["a8", "a9"]),
        (["--from-time", "2023-11-14T22:13:22Z"], [*(f"a{each}" for each in range(2, 10)), "b2"]),
        (["--from-time", "1m"], []),
        (["--offset", "2", "--partition", "0"], [*(f"a{each}" for each in range(2, 10)), "b2"]),
    ],
)
def test_several_topics_from_a_time_or_the_last_records(run: Run, options: list[str], values: list[str]) -> None:
    ran = run("consume", "a", "b", "--no-follow", *options)
    assert ran.code == 0, ran.err
    assert sorted(ran.out.split()) == values


def test_the_text_of_several_topics_names_them(run: Run) -> None:
    assert sorted(run("consume", "a", "b", "--last", "1", "--no-follow", "--print-offset").out.splitlines()) == [
        "a:0:9\ta9",
        "b:0:2\tb2",
    ]
    assert run("consume", "b", "--last", "1", "--no-follow", "--print-offset").out == "0:2\tb2\n"


def test_one_way_to_begin_and_one_to_print(run: Run) -> None:
    for options in (
        ["--last", "1", "--from-beginning"],
        ["--offset", "1", "--from-time", "1h"],
        ["--from-time", "soon"],
        ["--last", "1", "--group", "g"],
        ["--format", "%v", "--output", "json"],
        ["--format", "%v", "--print-key"],
        ["--format", "%q"],
    ):
        ran = run("consume", "a", "--no-follow", *options)
        assert (ran.code, ran.out, ran.err.count("\n")) == (2, "", 1), options


def test_a_format_prints_bytes_as_they_are(run: Run) -> None:
    ran = run("consume", "b", "--last", "1", "--no-follow", "--format", r"%t %p %o %T %k|%v|%s %K %S %h 100%%\t\x41\n")
    assert ran.out == f"b 0 2 {FIRST_MS + 2_000} |b2|b2 -1 2  100%\tA\n"


def formatted(text: str, record: Record) -> bytes:
    parts: list[bytes | Callable[[Record], bytes]] = format_parts(text)
    return b"".join(part if isinstance(part, bytes) else part(record) for part in parts)


def test_the_parts_of_a_format() -> None:
    record = Record("t", 1, 2, 3, b"\xff\0", None, (("h", b"1"), ("i", None)))
    assert formatted("%k", record) == b"\xff\0"
    assert formatted("%K %S %v.", record) == b"2 -1 ."
    assert formatted("%h", record) == "h=1,i=␀".encode()
    assert formatted("é\\\\n\\r\\0", record) == "é\\n\r\0".encode()
    for wrong in ("%", "%z", "\\", "\\q", "\\x4"):
        with pytest.raises(typer.BadParameter, match="has no meaning"):
            format_parts(wrong)


def test_tsv_is_lines_also_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    print_rows([{"a": 1, "b": None}], ("a", "b"), Output.TSV, optional=("b",))
    assert screen.getvalue() == "a\tb\n1\t-\n"


class TestMisspelt:
    """Names that are nearly right."""

    @pytest.mark.parametrize(
        "command",
        [
            ("topic", "offsets", "reading"),
            ("topic", "delete", "reading"),
            ("consume", "a", "reading", "--no-follow"),
        ],
    )
    def test_a_misspelled_topic_is_guessed(self, server: FakeCluster, run: Run, command: tuple[str, ...]) -> None:
        server.create_topic("readings")
        ran = run(*command)
        assert (ran.code, ran.err.count("\n")) == (1, 1)
        assert ran.err.rstrip().endswith("; did you mean readings?")

    def test_a_misspelled_group_is_guessed(self, server: FakeCluster, run: Run) -> None:
        server.groups.add("billing", 1)
        for command in ("describe", "delete", "members"):
            ran = run("group", command, "biling")
            assert ran.code == 1
            assert "; did you mean billing?" in ran.err, command

    def test_nothing_is_guessed_for_a_name_unlike_all_others(self, run: Run) -> None:
        assert "did you mean" not in run("topic", "offsets", "quite-different").err

    def test_commands_and_options(self, run: Run) -> None:
        assert "Did you mean 'topic'?" in run("topics", "list").err
        assert "(did you mean --internal)" in run("topic", "list", "--interna").err

    @pytest.mark.parametrize("command", [("topic", "list"), ("consume", "a"), ("perf", "produce", "a")])
    def test_an_address_with_a_scheme(self, run: Run, command: tuple[str, ...]) -> None:
        for scheme in ("http", "kafka"):
            ran = run(*command, "-b", f"{scheme}://localhost:9092")
            assert (ran.code, ran.err.count("\n")) == (2, 1)
            assert f"'{scheme}://localhost:9092' is a URL; leave its scheme out: localhost:9092" in ran.err

    def test_an_error_without_a_message_names_no_class(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise RaftlogError

        monkeypatch.setattr("raftlog.Admin.describe_topics", fail)
        ran = run("topic", "list")
        assert (ran.code, "RaftlogError" in ran.err, ran.err.count("\n")) == (1, False, 1)
