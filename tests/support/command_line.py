"""What a command that ran in this process left, and a person at its terminal."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from typing import Any, NamedTuple


class Ran(NamedTuple):
    """What a command left: its exit code and what it printed."""

    code: int
    out: str
    err: str

    @property
    def table(self) -> list[dict[str, str]]:
        """The lines of the table by column."""
        header, *lines = (line.split("\t") for line in self.out.splitlines())
        return [dict(zip(header, line, strict=True)) for line in lines]

    @property
    def json(self) -> Any:
        """The document."""
        return json.loads(self.out)


Run = Callable[..., Ran]


class Terminal(io.StringIO):
    """Standard input of a person that presses Ctrl-C when there is no line left."""

    def isatty(self) -> bool:
        """Return True."""
        return True

    def readline(self, size: int = -1, /) -> str:  # type: ignore[override] # as the base class in the stubs has it
        """Return what is typed next."""
        line = super().readline()
        if not line:
            raise KeyboardInterrupt
        return line
