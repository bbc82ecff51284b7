"""The pytest fixture `raftlog_cluster`; pytest loads this by itself where raftlog is installed.

It is imported into every test run of whoever installed raftlog; `-p no:raftlog` keeps it out of one.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftlog.testing import Cluster


@pytest.fixture
def raftlog_cluster() -> Iterator[Cluster]:
    """Give a test a running cluster of its own; it is gone after the test."""
    with Cluster() as cluster:
        yield cluster
