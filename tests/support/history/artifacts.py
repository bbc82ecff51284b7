"""Where drawings go: `artifacts/timelines/` of the checkout, each under the name of its test."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from tests.support.history.model import History, Problem
from tests.support.history.timeline import timeline

DIRECTORY: Final = Path(__file__).resolve().parents[3] / "artifacts" / "timelines"


def running_test() -> str:
    """Return the name of the running test, with its file, or "run" outside of a test."""
    current = os.environ.get("PYTEST_CURRENT_TEST", "run").rsplit(" (", 1)[0]
    return current.rsplit("/", 1)[-1]


def draw(
    history: History, problems: Sequence[Problem], error: BaseException | None = None, directory: Path | None = None
) -> Path:
    """Draw a history into a file that is named like it, and print where: shown with the report of a failed test."""
    directory = DIRECTORY if directory is None else directory
    directory.mkdir(parents=True, exist_ok=True)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", history.title.replace(".py::", ".")).strip("-")[:150]
    path = directory / f"{name}.svg"
    failure = None if error is None else f"{type(error).__name__}: {error}"
    path.write_text(timeline(history, problems, failure), encoding="utf-8")
    print(f"timeline: {path}")
    return path
