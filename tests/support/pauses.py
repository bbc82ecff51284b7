"""What commands do between two looks, in tests: something else than sleep."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from raftlog.cli.nodes import draining
from raftlog.cli.partitions import moving, partitions


def instead_of_sleeping(monkeypatch: pytest.MonkeyPatch, pause: Callable[[float], object]) -> None:
    """Have the commands that wait call this with the seconds, rather than sleep.

    Only those commands: threads of other libraries live in the process as well, and their sleep is none of the test's.
    """
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=pause)
    for module in (partitions, moving, draining):
        monkeypatch.setattr(module, "time", clock)
