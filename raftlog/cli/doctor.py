"""`raftlog doctor`: what is wrong with a cluster, and what to do about it."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer

from raftlog._doctor.checks import CHECKS
from raftlog._doctor.checks.permitted import NOT_ALL_SEEN
from raftlog._doctor.collect import INTERVAL_S, collect
from raftlog._doctor.picture import SEVERITIES, Finding, Picture
from raftlog._doctor.report import Report, examine
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import BOOTSTRAP_DEFAULT, BootstrapOption, Output, OutputOption, counted, print_json, print_rows

NAMED: Final = 8
"""Of what a finding is about, so many are named on a terminal; JSON has all."""
_WIDEST: Final = 120
_LABEL: Final = 9

IntervalOption = Annotated[
    float,
    typer.Option(
        "--interval",
        metavar="SECONDS",
        min=0,
        max=600,
        help="Time between two looks, by which groups and moves are seen to get on; 0: look once.",
    ),
]


class FailOn(StrEnum):
    """What `--fail-on` takes."""

    ERROR = "error"
    WARNING = "warning"
    NOTE = "note"
    NEVER = "never"


def doctor(
    interval_s: IntervalOption = INTERVAL_S,
    ignored: Annotated[
        list[str] | None,
        typer.Option("--ignore", metavar="CHECK", help="Leave this check out; may be repeated."),
    ] = None,
    fail_on: Annotated[
        FailOn, typer.Option(help="What is bad enough for exit code 1: this, and what is worse.")
    ] = FailOn.WARNING,
    list_checks: Annotated[bool, typer.Option("--list", metavar="", help="List the checks; asks nobody.")] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Look for what is wrong with a cluster, and say what to do about each.

    It only asks, and changes nothing. Errors do not work, or lose records; warnings will, after one more failure or
    some time; notes may be meant. Exit code 0: nothing but notes was found, 1: errors or warnings, or nobody answers. A
    check that cannot be made, since nobody answers what it needs, counts as a warning.

    Example: raftlog doctor --output json --fail-on error
    """
    known = {check.id for check in CHECKS}
    for each in ignored or ():
        if each not in known:
            raise typer.BadParameter(f"there is no check {each!r}; raftlog doctor --list names them")
    if list_checks:
        print_rows([{"check": check.id, "about": check.about} for check in CHECKS], ("check", "about"), output)
        return
    with connect_admin(bootstrap) as admin:
        picture = collect(admin, interval_s=interval_s)
    report = examine(picture, CHECKS, ignored=ignored or ())
    if output is Output.JSON:
        print_json(report.document())
    else:
        print("\n".join(told(report, picture, width(), more="--output json has all")))
    if is_bad(report, fail_on):
        raise typer.Exit(1)


def is_bad(report: Report, fail_on: FailOn) -> bool:
    """Whether something was found that is as bad as that, or worse; what could not be looked at is a warning."""
    found = {each.severity for each in report.findings} | (set() if report.is_whole() else {"warning"})
    if fail_on is FailOn.NEVER:
        return False
    return any(severity in found for severity in SEVERITIES[: SEVERITIES.index(fail_on.value) + 1])


def width() -> int:
    """Return how wide text may be: as the terminal is, within what is read easily."""
    if not sys.stdout.isatty():
        return _WIDEST
    return max(60, min(_WIDEST, shutil.get_terminal_size().columns))


def told(report: Report, picture: Picture, columns: int, *, named: int = NAMED, more: str = "") -> Iterator[str]:
    """Yield the lines for people: each finding, what could not be checked, and a summary."""
    for found in report.findings:
        yield from _finding(found, columns, named, more)
        yield ""
    skipped = report.skipped()
    for why in dict.fromkeys(check.why for check in skipped):
        names = ", ".join(check.check for check in skipped if check.why == why)
        yield from _wrapped("skipped", f"{names}: {why}", columns)
    told_of = any(found.check == NOT_ALL_SEEN for found in report.findings)
    unknown = [each for each in report.unanswered if not (each.refused and told_of)]
    for unanswered in unknown:
        yield from _wrapped("refused" if unanswered.refused else "unknown", str(unanswered), columns)
    if skipped or unknown:
        yield ""
    yield _summary(report, picture)


def _finding(found: Finding, columns: int, named: int, more: str) -> Iterator[str]:
    yield from _wrapped(found.severity, f"{found.check}: {found.what}", columns)
    for number, place in enumerate(_some(found.where, named, more)):
        yield from _wrapped("  where" if number == 0 else "", place, columns)
    yield from _wrapped("  do", found.remedy, columns)


def _some(where: Sequence[str], named: int, more: str) -> Iterator[str]:
    yield from where[:named]
    if len(where) > named:
        yield f"and {len(where) - named:,} more{f'; {more}' if more else ''}"


def _wrapped(label: str, text: str, columns: int) -> list[str]:
    return textwrap.wrap(
        text,
        columns,
        initial_indent=f"{label:<{_LABEL}}",
        subsequent_indent=" " * _LABEL,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _summary(report: Report, picture: Picture) -> str:
    brokers = len(picture.brokers())
    nodes = len(picture.nodes or {}) + len(picture.silent_nodes)
    topics = picture.topics
    has = [counted(nodes, "node"), counted(brokers, "broker")]
    if topics is not None:
        total = len(topics) + len(picture.hidden_topics)
        shown = f"{len(topics)} of " if picture.hidden_topics else ""
        has += [
            f"{shown}{counted(total, 'topic')}",
            counted(sum(len(topic.partitions) for topic in topics), "partition"),
        ]
    results = [counted(report.count(severity), severity) for severity in SEVERITIES if report.count(severity)]
    made = sum(each.result in ("ok", "found") for each in report.checked)
    said = ", ".join(results) or ("all fine" if report.is_whole() else "nothing found, but not all is known")
    return f"cluster {report.cluster_id}: {', '.join(has)}; {counted(made, 'check')}: {said}"
