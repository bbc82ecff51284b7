"""Formats and files, each alone, on arbitrary bytes: they return a valid value or refuse."""

from __future__ import annotations

import pytest

from tests.fuzz.ci import fuzz

NAMES = (
    *("batch", "small-batch", "aborted", "wire", "log-lines", "log-indexes", "producer-snapshots", "leader-epochs"),
    *("metadata-formats", "metadata-state", "server-config", "cli-inputs", "cli-segments"),
    *("kafka-requests", "kafka-batches", "kafka-authentication"),
)


@pytest.mark.parametrize("name", NAMES)
def test_it_takes_what_is_right_and_refuses_the_rest(name: str) -> None:
    fuzz(name)
