"""Commands that do the same to each of several ids: what was refused does not keep the others from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import typer

from raftlog.cli.output import Output, print_error, print_json
from raftlog.errors import RaftlogError


def refusals(ids: Iterable[str], do: Callable[[str], object]) -> dict[str, str | None]:
    """Do it to each id once; return why it was refused, None: it was not."""
    found: dict[str, str | None] = {}
    for each in dict.fromkeys(ids):
        try:
            do(each)
        except RaftlogError as error:
            found[each] = str(error)
        else:
            found[each] = None
    return found


def tell(found: dict[str, str | None], done: str, sentence: Callable[[str], str], what: str, output: Output) -> None:
    """Print what became of each id. `done`: what was done to it, in a word; `what` is the kind of id, if it is said.

    Raises:
        typer.Exit: with code 1, when one was refused.
    """
    refused = {each: why for each, why in found.items() if why is not None}
    if output is Output.JSON:
        print_json({done: [each for each in found if each not in refused], "refused": refused})
    else:
        for each in found:
            if each not in refused:
                print(sentence(each))
    for each, why in refused.items():
        print_error(f"not {done}: {why}" if each in why else f"{what}{each} was not {done}: {why}")
    if refused:
        raise typer.Exit(1)
