"""Formats and files by themselves, against whatever bytes: a value that keeps its promises, or a refusal."""

from __future__ import annotations

import pytest

from tests.fuzz.ci import fuzz

NAMES = (
    *("batch", "small-batch", "aborted", "wire", "log-lines", "log-indexes", "producer-snapshots", "leader-epochs"),
    *("metadata-formats", "metadata-state", "server-config", "cli-inputs", "cli-segments"),
)


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_what_is_right_and_refuses_the_rest(name: str) -> None:
    fuzz(name)
