"""The checks of `./dev check` find the problems that they are for."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tools.check import lock_problems, main, requirements_of, text_problems

LOCK = """\
# made by a tool
numpy==2.4.6 ; python_full_version < '3.12' \\
    --hash=sha256:00
numpy==2.5.5 ; python_full_version >= '3.12' \\
    --hash=sha256:11
types-psutil==7.2 \\
    --hash=sha256:22
"""


def test_a_lock_that_covers_the_project_has_no_problems() -> None:
    assert lock_problems("x.lock", LOCK, ["numpy>=2.2", "types_psutil>=7"]) == []


@pytest.mark.parametrize(
    ("text", "requirements", "words"),
    [
        (LOCK, ["numpy>=2.5"], "numpy 2.4.6 does not satisfy >=2.5"),
        (LOCK, ["rich>=1"], "rich of pyproject.toml is missing"),
        (LOCK + "rich==1\n", [], "rich has no hash"),
        (LOCK + "--index-url x\n", [], "an address or an option"),
        (LOCK.replace("a tool", "https" + "://example"), [], "an address or an option"),
    ],
)
def test_what_is_wrong_with_a_lock_is_named(text: str, requirements: list[str], words: str) -> None:
    problems = lock_problems("x.lock", text, requirements)
    assert any(words in problem for problem in problems)


def test_an_extra_of_extras_stands_for_their_requirements() -> None:
    extras = {"cli": ["typer>=1"], "spark": ["pyspark[sql]>=4"], "all": ["raftlog[cli,spark]", "psutil>=7"]}
    assert requirements_of(extras, ["all"]) == ["typer>=1", "pyspark[sql]>=4", "psutil>=7"]
    assert requirements_of(extras, ["cli"]) == ["typer>=1"]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("fine\n", []),
        ("a\n/ho" + "me/ada/x\n", ["2: the path of one machine"]),
        ("see raftlog/home/x and {root}/home/x\n", []),
        ("TO" + "DO later\n", ["1: an unfinished mark; finish it or open an issue"]),
        ("blank \n", ["1: blanks at the line's end"]),
        ("no end", ["1: no newline at the file's end"]),
    ],
)
def test_unwanted_text_is_found(text: str, found: list[str]) -> None:
    assert text_problems(text) == found


@pytest.mark.parametrize(
    ("names", "run"), [([], "abc"), (["b"], "b"), (["--without", "b"], "ac"), (["--without", "d"], ""), (["d"], "")]
)
def test_all_checks_run_or_those_that_are_named_or_all_but_those(
    names: list[str], run: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def check(name: str) -> Callable[[], list[str]]:
        def note() -> list[str]:
            ran.append(name)
            return []

        return note

    monkeypatch.setattr("tools.check._CHECKS", {name: check(name) for name in "abc"})
    assert main(names) == (0 if run else 2)
    assert "".join(ran) == run
