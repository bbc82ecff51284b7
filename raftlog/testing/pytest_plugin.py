"""Pytest's fixtures `raftlog_cluster` and `raftlog_session_cluster`.

pytest loads this plugin in every run where raftlog is installed.

`-p no:raftlog` disables it.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftlog.testing import Cluster


@pytest.fixture
def raftlog_cluster() -> Iterator[Cluster]:
    """Give a test its own running cluster, which is removed after the test."""
    with Cluster() as cluster:
        yield cluster


@pytest.fixture(scope="session")
def raftlog_session_cluster() -> Iterator[Cluster]:
    """Give the tests of a run one running cluster together, started by the first one: let each use its own topics.

    With pytest-xdist each worker has one.
    """
    with Cluster() as cluster:
        yield cluster
