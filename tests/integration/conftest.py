"""Clusters that the tests of a file share; a file that needs another one has a fixture of the same name."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from raftlog.testing import Cluster
from tests.support.steady import PATIENT, STEADY


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """One server."""
    with Cluster(config=STEADY) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    """Three servers; each test leaves all of them running."""
    with Cluster(nodes=3, config=PATIENT) as cluster:
        yield cluster
