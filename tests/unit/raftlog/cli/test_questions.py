"""Commands that delete ask at a terminal; --yes, and Kafka's --force, skip the question; a script is not asked."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from raftlog import TopicPartition
from tests.support.batches import batch_of
from tests.support.command_line import Run
from tests.support.fake_broker import FakeCluster

QUESTIONS = [
    (("topic", "delete", "a"), "delete topic a and all of its records? [y/N]: "),
    (("topic", "delete-records", "a", "--all"), "delete the records of a-0 below its end? [y/N]: "),
    (
        ("topic", "delete-records", "a", "-p", "0", "--before-offset", "1"),
        "delete the records of a-0 below offset 1? [y/N]: ",
    ),
    (("group", "delete", "g"), "delete group g and the committed offsets? [y/N]: "),
    (("group", "delete-offsets", "g", "--topic", "a"), "delete 1 committed offset of group g? [y/N]: "),
]


@pytest.fixture
def server() -> Iterator[FakeCluster]:
    """Topic `a` with a record, and group `g` that has read it."""
    with FakeCluster() as cluster:
        cluster.create_topic("a", 1)
        cluster.append("a", batch_of(b"x"))
        cluster.groups.add("g", 1, {TopicPartition("a", 0): 1})
        yield cluster


@pytest.mark.parametrize(("command", "question"), QUESTIONS, ids=lambda each: " ".join(each[:2]))
def test_a_deletion_asks(server: FakeCluster, run: Run, command: tuple[str, ...], question: str) -> None:
    refused = run(*command, terminal="\n")
    assert (refused.code, refused.out, refused.err) == (1, "", f"{question}not deleted\n")
    assert run(*command, terminal="y\n").code == 0


@pytest.mark.parametrize("option", ["--yes", "-y", "--force"])
@pytest.mark.parametrize(("command", "question"), QUESTIONS[:4], ids=lambda each: " ".join(each[:2]))
def test_no_question_with_the_option(
    server: FakeCluster, run: Run, command: tuple[str, ...], question: str, option: str
) -> None:
    ran = run(*command, option, terminal="")
    assert ran.code == 0, ran.err
    assert question not in ran.err


def test_a_script_is_not_asked(server: FakeCluster, run: Run) -> None:
    for command, _ in QUESTIONS[1:]:
        if command[:2] != ("group", "delete"):
            ran = run(*command)
            assert (ran.code, "[y/N]" in ran.err) == (0, False), ran.err
    assert run("group", "delete", "g").code in (0, 1)
    assert run("topic", "delete", "a").out == "topic a deleted\n"


def test_one_of_the_two_names_is_in_the_help(run: Run) -> None:
    for command in (("topic", "delete"), ("acl", "remove"), ("user", "delete"), ("apply",), ("partition", "elect")):
        shown = run(*command, "--help").out
        assert "--yes" in shown
        assert not re.search(r"^\W*--force {2,}\w", shown, re.MULTILINE), (
            "--force must be mentioned only as Kafka's name for --yes"
        )
