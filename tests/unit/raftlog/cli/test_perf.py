"""`raftlog perf ...`: what it measures, that it ends, and what it prints."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

import raftlog
from raftlog.cli import perf
from raftlog.cli.perf import Paced, latencies, payloads, rates
from tests.support.command_line import Run
from tests.support.fake_broker import FakeCluster


@pytest.fixture
def server() -> Iterator[FakeCluster]:
    """Topic `a` with two partitions and no record."""
    with FakeCluster() as cluster:
        cluster.create_topic("a", 2)
        yield cluster


def test_latencies_are_in_milliseconds() -> None:
    found = latencies([each / 1000 for each in range(1000, 0, -1)])
    assert found == {
        "mean_ms": 500.5,
        "p50_ms": 501.0,
        "p95_ms": 951.0,
        "p99_ms": 991.0,
        "p999_ms": 1000.0,
        "max_ms": 1000.0,
    }
    assert set(latencies([0.002]).values()) == {2.0}
    assert set(latencies([]).values()) == {None}


def test_rates() -> None:
    assert rates(1000, 2 << 20, 4.0) == {
        "records": 1000,
        "seconds": 4.0,
        "records_per_second": 250.0,
        "mib_per_second": 0.5,
    }
    assert rates(0, 0, 0.0)["records_per_second"] == 0


def test_payloads_have_the_size_and_are_the_same_in_each_run() -> None:
    found = payloads(100)
    assert {len(each) for each in found} == {100}
    assert len(set(found)) == len(found)
    assert found == payloads(100)
    assert all(each.isalpha() and each.isupper() for each in found)


def test_a_paced_loop_keeps_its_rate_and_catches_up_after_a_pause() -> None:
    now, slept = 100.0, []

    def sleep(seconds: float) -> None:
        nonlocal now
        slept.append(seconds)
        now += seconds

    paced = Paced(10, lambda: now, sleep)
    for turn in range(3):
        paced.wait(turn)
    assert slept == pytest.approx([0.1, 0.1])
    now += 0.35
    for turn in range(3, 6):
        paced.wait(turn)
    assert len(slept) == 2, "a producer that is late must not sleep"
    paced.wait(6)
    assert now == pytest.approx(100.6)
    Paced(None, lambda: now, sleep).wait(1_000_000)
    assert len(slept) == 3


def test_producing_and_reading_again(server: FakeCluster, run: Run) -> None:
    options = ("--records", "300", "--record-size", "50", "--acks", "1", "--batch-size", "4096", "--linger-ms", "1")
    made = run("perf", "produce", "a", *options, "-z", "zstd", "-o", "json")
    assert made.code == 0, made.err
    assert (made.json["topic"], made.json["records"], made.json["failed"]) == ("a", 300, 0)
    assert 0 < made.json["p50_ms"] <= made.json["p99_ms"] <= made.json["max_ms"]
    assert made.json["records_per_second"] > 0
    values = [value for part in (0, 1) for value in server.values("a", part)]
    assert len(values) == 300
    assert {len(value or b"") for value in values} == {50}
    for kind in ("records", "arrow"):
        read = run("perf", "consume", "a", "--as", kind, "-o", "json")
        assert (read.code, read.json["records"]) == (0, 300), read.err
        assert read.json["first_record_ms"] >= 0
    assert list(run("perf", "consume", "a").table[0]) == [
        "topic",
        "records",
        "seconds",
        "records_per_second",
        "mib_per_second",
        "first_record_ms",
    ]


def test_no_more_records_are_read_than_were_asked_for(server: FakeCluster, run: Run) -> None:
    assert run("perf", "produce", "a", "--records", "300", "--record-size", "50").code == 0
    for kind in ("records", "arrow"):
        assert run("perf", "consume", "a", "--as", kind, "--records", "7", "-o", "json").json["records"] == 7


@pytest.mark.parametrize(("command", "method"), [("produce", "send"), ("consume", "poll"), ("end-to-end", "send")])
def test_ctrl_c_prints_the_results_so_far(
    server: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch, command: str, method: str
) -> None:
    options = ("--record-size", "50") if command != "consume" else ("-c", "max.poll.records=3")
    assert run("perf", "produce", "a", "--records", "300", "--record-size", "50").code == 0
    client: Any = raftlog.Consumer if method == "poll" else raftlog.Producer
    real, calls = getattr(client, method), itertools.count(1)

    def interrupted(*arguments: Any, **more: Any) -> Any:
        if next(calls) == 40:
            raise KeyboardInterrupt
        return real(*arguments, **more)

    monkeypatch.setattr(client, method, interrupted)
    ran = run("perf", command, "a", *options, "-o", "json")
    assert ran.code == 130
    assert 0 < ran.json["records"] < 300


def test_a_run_ends_when_its_time_is_over_and_keeps_to_its_rate(server: FakeCluster, run: Run) -> None:
    ran = run("perf", "produce", "a", "--rate", "20", "--seconds", "0.5", "-o", "json")
    assert ran.code == 0, ran.err
    assert 1 <= ran.json["records"] <= 11
    assert ran.json["seconds"] >= 0.4


def test_each_record_is_awaited_from_end_to_end(server: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "_TELL_EVERY_S", 0.0)
    ran = run("perf", "end-to-end", "a", "--records", "6", "--warm-up", "2", "--record-size", "20", "-o", "json")
    assert ran.code == 0, ran.err
    assert ran.json["records"] == 6
    assert ran.json["max_ms"] >= ran.json["p50_ms"] > 0
    assert [len(server.values("a", part)) for part in (0, 1)] == [4, 4], "the records must go to the partitions in turn"
    assert ran.err.count(" a second (") == 6


def test_a_record_that_does_not_come_is_an_error(
    server: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perf, "_ARRIVAL_S", 0.1)
    monkeypatch.setattr(raftlog.Consumer, "poll", lambda *arguments: [])
    ran = run("perf", "end-to-end", "a", "--records", "1")
    assert (ran.code, ran.out) == (1, "")
    assert "did not come within 0.1 s" in ran.err


def test_a_topic_is_created_only_if_that_is_asked_for(server: FakeCluster, run: Run) -> None:
    for _ in range(2):  # the second run finds it
        ran = run("perf", "produce", "new", "--create", "--partitions", "3", "--records", "1")
        assert ran.code == 0, ran.err
    assert sum(len(server.values("new", part)) for part in range(3)) == 2
    for wrong in (["--partitions", "3"], ["-c", "transactional.id=t"], ["--record-size", "1"]):
        refused = run("perf", "produce", "a", *wrong)
        assert (refused.code, refused.err.count("\n")) == (2, 1), wrong
    empty = run("perf", "consume", "a")
    assert (empty.code, "topic a has no records; raftlog perf produce a writes some" in empty.err) == (1, True)


def test_unacknowledged_records_are_counted(server: FakeCluster, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(perf, "_FLUSH_S", 0.2)
    server.hold_acks()
    ran = run("perf", "produce", "a", "--records", "3", "-o", "json")
    server.release_acks()
    assert (ran.code, ran.json["records"], ran.json["failed"]) == (1, 0, 3)
    assert "not all records were acknowledged within 0.2 s" in ran.err
