"""`raftlog apply FILE`: topics, users and permissions as a file has them; the second time there is nothing to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

import raftlog
from raftlog.cli import acls, apply_plan, min_isr
from raftlog.cli.apply_file import FileMistakes, read
from raftlog.cli.apply_plan import CHANGED, CREATED, DIFFERS, FAILED, NOT_TRIED, REMOVED, UNCHANGED, Object, Step
from raftlog.cli.clients import connect_admin
from raftlog.cli.output import (
    BOOTSTRAP_DEFAULT,
    BootstrapOption,
    Output,
    OutputOption,
    counted,
    print_error,
    print_json,
    print_note,
    print_rows,
)
from raftlog.errors import RaftlogError

_COLUMNS: Final = ("kind", "name", "result", "details")
_WRONG: Final = 2
"""The exit code for a file that is wrong, as for a command line that is."""


def apply(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", dir_okay=False, show_default=False, help="JSON or TOML, by its suffix.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", metavar="", help="Say what would be done, and do nothing.")] = (
        False
    ),
    set_passwords: Annotated[
        bool,
        typer.Option(
            "--set-passwords",
            metavar="",
            help="Also of users who are there, who then have to log in again; else they are left alone.",
        ),
    ] = False,
    prune_acls: Annotated[
        bool,
        typer.Option("--prune-acls", metavar="", help="Remove permissions that are not in the file; shown first."),
    ] = False,
    force: Annotated[bool, typer.Option("--force", metavar="", help="Do not ask before --prune-acls.")] = False,
    accept_differences: Annotated[
        bool,
        typer.Option("--accept-differences", metavar="", help="Exit code 0 also where it differs in what stays."),
    ] = False,
    bootstrap: BootstrapOption = BOOTSTRAP_DEFAULT,
    output: OutputOption = Output.TABLE,
) -> None:
    """Give the cluster the topics, users and permissions of a file. What it has already is left as it is.

    The file is checked first, as a whole; where anything is wrong, nothing is done. What is not in the file stays:
    topics, settings, users, and permissions but for --prune-acls. Topics get more partitions, never fewer.
    docs/security.md has an example.

    Exit code 0: it is all as the file says, whether or not something had to be done for that; 1: not all of it, since
    something was refused, or differs in what this does not change (a number of replicas, fewer partitions); 2: the
    file is wrong, or has what brokers would refuse, and nothing was changed.

    Example: raftlog apply cluster.toml --dry-run
    """
    try:
        wanted = read(file)
    except FileMistakes as error:
        _refuse(file, error)
    if prune_acls and wanted.acls is None:
        raise typer.BadParameter(f"--prune-acls: {file} has no acls; with an empty list of them all would go")
    with connect_admin(bootstrap) as admin:
        try:
            plan = apply_plan.make(admin, wanted, set_passwords=set_passwords, prune_acls=prune_acls)
        except FileMistakes as error:
            _refuse(file, error)
        if not dry_run:
            if plan.pruned and not force:
                acls.ask(plan.pruned, "nothing was changed")
            _carry_out(admin, plan.steps)
    objects = [each for step in plan.steps for each in step.objects]
    if output is Output.JSON:
        print_json({"dry_run": dry_run, "objects": [vars(each) for each in objects]})
    else:
        print_rows([_row(each, dry_run) for each in objects], _COLUMNS, output, optional=("details",))
        print_note(_summary(objects, dry_run))
    for each in objects:
        if each.result == FAILED:
            print_error(f"{each.kind} {each.name}: {each.details}")
    if any(each.result in (FAILED, NOT_TRIED) or (each.differs and not accept_differences) for each in objects):
        raise typer.Exit(1)


def _refuse(file: Path, error: FileMistakes) -> None:
    what = counted(len(error.mistakes), "thing is wrong", "things are wrong")
    print_error("\n".join([f"{what} with {file}; nothing was changed", *error.mistakes]))
    raise typer.Exit(_WRONG)


def _carry_out(admin: raftlog.Admin, steps: Sequence[Step]) -> None:
    """Do all steps; what is refused does not keep the others from being done, a cluster that does not answer does."""
    away = ""
    for step in steps:
        if step.do is None:
            continue
        if away:
            _note(step.objects, NOT_TRIED, away)
            continue
        try:
            step.do()
        except RaftlogError as error:
            _note(step.objects, FAILED, str(error))
            away = str(error) if error.retriable else ""
    done = [each for step in steps for each in step.objects if each.kind == "topic"]
    names = [
        each.name for each in done if each.result == CREATED or (each.result == CHANGED and min_isr.KEY in each.details)
    ]
    if names and not away:
        min_isr.warn_of_topics(admin, names)


def _note(objects: Iterable[Object], result: str, details: str) -> None:
    for each in objects:
        each.result, each.details = result, details


def _row(found: Object, dry_run: bool) -> dict[str, object]:
    would = dry_run and found.result in (CREATED, CHANGED, REMOVED)
    return {**vars(found), "result": f"would be {found.result}" if would else found.result}


def _summary(objects: Sequence[Object], dry_run: bool) -> str:
    counts = Counter(each.result for each in objects)
    counts[DIFFERS] = sum(each.differs for each in objects)
    said = [
        f"{counts[each]:,} {each}"
        for each in (CREATED, CHANGED, REMOVED, UNCHANGED, DIFFERS, FAILED, NOT_TRIED)
        if counts[each] or each == UNCHANGED
    ]
    return f"{', '.join(said)}{'; nothing was done, this was a dry run' if dry_run else ''}"
