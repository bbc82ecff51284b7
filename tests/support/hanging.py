"""Hanging transactions: records of a partition whose coordinator has never heard of it, so that no marker comes.

Leaders that verify transactions refuse such records, so the cluster is one that was founded before they did.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from raftlog import Producer
from raftlog.testing import Cluster
from raftmeta.features import PRODUCER_OWNERS_LEVEL

_FOUNDING = f"""
import raftmeta.features
from raftlog.v1.records_pb2 import FeatureRecord
level = FeatureRecord(name=raftmeta.features.METADATA_VERSION, level={PRODUCER_OWNERS_LEVEL - 1})
raftmeta.features.newest_levels = lambda: [level]
"""


@contextmanager
def before_verification(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """One server, in a cluster that was founded before leaders verified transactions."""
    (tmp_path / "sitecustomize.py").write_text(_FOUNDING)
    with monkeypatch.context() as patched:
        patched.setenv("PYTHONPATH", str(tmp_path))
        cluster = Cluster().__enter__()
    with cluster:
        yield cluster


def send_without_adding(
    producer: Producer, topic: str, value: bytes, monkeypatch: pytest.MonkeyPatch, partition: int = 0
) -> None:
    """Send a record in a transaction to which its partition is not added."""

    async def nothing(*arguments: object, **more: object) -> None:
        pass

    transactions = producer._engine.transactions
    assert transactions is not None
    with monkeypatch.context() as patched:
        patched.setattr(transactions._calls, "add", nothing)
        producer.send(topic, value, partition=partition).result(60.0)
