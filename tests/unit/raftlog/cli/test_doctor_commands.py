"""`raftlog doctor` and `raftlog support-bundle`: against the real admin service, of a server that knows less."""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from raftlog._doctor.checks import CHECKS
from tests.support.admin_service import AdminServer
from tests.support.command_line import Run

ONCE = ("--interval", "0")
NOBODY = ("--bootstrap", "127.0.0.1:1")


@pytest.fixture(autouse=True)
def no_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Servers get no time to begin to listen."""
    monkeypatch.setattr("raftlog._client.admin.REFUSED_GRACE_S", 0.1)


def test_checks_are_listed_without_a_cluster(run: Run) -> None:
    ran = run("doctor", "--list", "-o", "json", *NOBODY)
    assert ran.code == 0
    assert [each["check"] for each in ran.json] == [check.id for check in CHECKS]
    assert all(each["about"] for each in ran.json)


def test_what_is_wrong_is_said_with_what_to_do(server: AdminServer, run: Run) -> None:
    assert run("topic", "alter", "a", "--config", "min.insync.replicas=3").code == 0
    server.set_isr("a", [1, 2])
    ran = run("doctor", *ONCE)
    assert ran.code == 1
    assert ran.err == ""
    lines = ran.out.splitlines()
    first = next(number for number, line in enumerate(lines) if "partition-under-min-isr" in line)
    assert lines[first].startswith("error    partition-under-min-isr: 1 partition refuses writes with acks=all")
    assert "  where  a-0 (in sync: 1, 2 of 1, 2, 3; needs 3)" in lines
    assert any(line.startswith("  do     ") for line in lines)
    assert all(len(line) <= 120 for line in lines[:-1])
    assert "2 partitions; " in lines[-1]


def test_a_server_that_does_not_know_all_questions_is_looked_at_as_far_as_it_goes(run: Run) -> None:
    found = run("doctor", *ONCE, "-o", "json").json
    results = {each["check"]: (each["result"], each["why"]) for each in found["checks"]}
    assert len(results) == len(CHECKS)
    assert results["partition-under-replicated"] == ("ok", "")
    assert results["node-silent"][0] == "found"
    assert results["group-missed-records"][0] == "skipped"
    assert "does not know this call" in results["group-missed-records"][1]
    assert {each["part"] for each in found["unanswered"]} >= {"nodes", "groups", "transactions"}
    assert found["worst"] == "warning"


def test_what_is_bad_enough_for_the_exit_code_is_said(server: AdminServer, run: Run) -> None:
    assert run("doctor", *ONCE, "--fail-on", "error").code == 0
    assert run("doctor", *ONCE, "--fail-on", "warning").code == 1
    silent = run("doctor", *ONCE, "--ignore", "node-silent", "-o", "json")
    assert silent.code == 1, "the exit code must be 1, as groups and transactions could not be examined"
    ignored = [each["check"] for each in silent.json["checks"] if each["result"] == "skipped"]
    assert (
        run("doctor", *ONCE, *(word for check in [*ignored, "node-silent"] for word in ("--ignore", check))).code == 0
    )
    assert run("topic", "alter", "a", "--config", "min.insync.replicas=4").code == 0
    assert run("doctor", *ONCE, "--fail-on", "error").code == 1
    assert run("doctor", *ONCE, "--fail-on", "never").code == 0


def test_a_check_that_there_is_not_is_a_wrong_command_line(run: Run) -> None:
    ran = run("doctor", "--ignore", "group-leg", *NOBODY)
    assert ran.code == 2
    assert "unknown check 'group-leg'; raftlog doctor --list names them" in ran.err


def test_that_nobody_answers_is_an_error(run: Run) -> None:
    ran = run("doctor", *NOBODY)
    assert (ran.code, ran.out) == (1, "")
    assert ran.err.startswith("error: no broker answers at 127.0.0.1:1")


# The bundle


def contents(path: Path) -> dict[str, bytes]:
    """Return the files of an archive without the directory that all lie in."""
    with tarfile.open(path) as archive:
        directories = {member.name.partition("/")[0] for member in archive}
        assert len(directories) == 1
        return {
            member.name.partition("/")[2]: file.read()
            for member in archive
            if (file := archive.extractfile(member)) is not None
        }


def test_a_bundle_is_written_for_its_owner_alone(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "bundle.tar.gz"
    log = tmp_path / "server.log"
    log.write_text("first\nsecond\npassword=hunter2\n")
    ran = run("support-bundle", *ONCE, "--to", str(path), "--log", str(log), "--log-lines", "2", "-o", "json")
    assert ran.code == 0, ran.err
    assert path.stat().st_mode & 0o777 == 0o600
    files = contents(path)
    assert ran.json["file"] == str(path)
    assert ran.json["bytes"] == path.stat().st_size
    assert ran.json["files"] == {name: len(content) for name, content in files.items()}
    assert files["logs/given-1-server.log"] == b"second\npassword=[hidden]\n"
    assert json.loads(files["topics.json"])[0]["name"] == "a"
    assert b"node-silent" in files["doctor.txt"]
    assert ran.json["problems"] == files["problems.txt"].decode().splitlines()
    assert any("node 1" in problem for problem in ran.json["problems"])
    assert b"doctor.json" in files["README.txt"]


def test_a_bundle_goes_to_standard_output_where_nothing_can_be_written(server: AdminServer, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "raftlog", "support-bundle", *ONCE, "--to", "-", "-b", server.bootstrap]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=60, check=True)
    path = tmp_path / "came.tar.gz"
    path.write_bytes(done.stdout)
    assert b"node-silent" in contents(path)["doctor.txt"]
    assert b"not in it: node 1: " in done.stderr
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_is_written_over(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "there"
    path.write_text("precious")
    ran = run("support-bundle", "--to", str(path))
    assert ran.code == 1
    assert "already exists" in ran.err
    assert path.read_text() == "precious"
    missing = tmp_path / "no" / "bundle"
    ran = run("support-bundle", *ONCE, "--to", str(missing))
    assert ran.code == 1
    assert ran.err.startswith(f"error: there is no {missing}")


def test_without_a_cluster_it_has_what_is_on_this_machine(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = tmp_path / "server.log"
    log.write_text("the end\n")
    ran = run("support-bundle", "--log", str(log), *NOBODY)
    assert ran.code == 1
    [path] = tmp_path.glob("raftlog-support-*.tar.gz")
    files = contents(path)
    assert set(files) == {"README.txt", "logs/given-1-server.log", "versions.json", "problems.txt"}
    assert b"no broker answers" in files["problems.txt"]
    assert path.name in ran.out
    assert "error: no broker answers" in ran.err
