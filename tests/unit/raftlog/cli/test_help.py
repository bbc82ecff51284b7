"""Help texts in a terminal of 80 columns, and what is said of options before a command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from raftlog.cli.app import tree
from tests.support.command_line import Run

APP = tree()
_SHORT = 16
"""Such words fit beside the options of every command."""


def long_words(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the commands with options whose values are described by long words, and each of these words."""
    for name, each in getattr(command, "commands", {}).items():
        yield from long_words(each, *path, name)
    for parameter in command.params:
        if parameter.param_type_name == "option":
            shown = str(parameter.display_type_rich(ctx=command.context_class(command)) or "")
            yield from ((path, word) for word in shown.split() if len(word) > _SHORT)


def test_what_an_option_takes_is_not_broken_in_a_word() -> None:
    found = list(long_words(get_command(APP)))
    assert found
    pages = {path: CliRunner().invoke(APP, [*path, "--help"], env={"COLUMNS": "80"}).output for path, _ in found}
    assert [(path, word) for path, word in found if word not in pages[path]] == []


def pages(command: Any, *path: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield the help of all commands in 80 columns."""
    yield path, CliRunner().invoke(APP, [*path, "--help"], env={"COLUMNS": "80"}).output
    for name, each in getattr(command, "commands", {}).items():
        yield from pages(each, *path, name)


def test_nothing_is_cut_and_flags_have_no_type() -> None:
    found = dict(pages(get_command(APP)))
    assert len(found) > 50
    assert [path for path, page in found.items() if "…" in page or "<bool>" in page] == []


def test_paragraphs_are_wrapped_by_the_terminal_only() -> None:
    page = CliRunner().invoke(APP, ["txn", "find-hanging", "--help"], env={"COLUMNS": "80"}).output
    assert " ".join(page.splitlines()[7].split()).endswith(
        "Its cause is a client that breaks the protocol, or a record that"
    )


def test_an_option_without_its_value_names_the_help_of_its_command(run: Run) -> None:
    ran = run("group", "reset-offsets", "g", "--to-offset")
    assert (ran.code, ran.err) == (
        2,
        "error: Option '--to-offset' requires an argument; try 'raftlog group reset-offsets --help'\n",
    )


@pytest.mark.parametrize("option", ["--bootstrap-server", "--bootstrap", "--json"])
def test_an_option_before_the_command_is_named_as_it_was_typed(run: Run, option: str) -> None:
    ran = run(option, "127.0.0.1:9999", "topic", "list")
    assert ran.code == 2
    assert f"no option {option} before a command; write it after the command; try 'raftlog --help'" in ran.err
