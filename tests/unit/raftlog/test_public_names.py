"""What users import: the names, the cost of importing them, and that nothing heavy comes along."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import raftlog
from raftlog import aio

NAMES = [
    "Acks",
    "AclBinding",
    "AclFilter",
    "AclOperation",
    "AclPermission",
    "Admin",
    "AdminKeywords",
    "BatchDelivery",
    "CommittedBatch",
    "Compression",
    "Consumer",
    "ConsumerKeywords",
    "DelayQueue",
    "Delivery",
    "GroupMetadata",
    "IsolationLevel",
    "OffsetAndMetadata",
    "OffsetAndTimestamp",
    "OffsetReset",
    "PatternType",
    "Producer",
    "ProducerKeywords",
    "QuotaEntity",
    "RaftlogError",
    "RebalanceListener",
    "Record",
    "RecordMetadata",
    "RecordRange",
    "ResourceType",
    "Role",
    "ScramMechanism",
    "Stage",
    "StageKeywords",
    "StageToken",
    "StagedWriter",
    "TopicPartition",
    "UserScramCredential",
    "aio",
    "errors",
    "read_table",
    "testing",
]


def test_exported_names() -> None:
    assert raftlog.__all__ == NAMES
    for name in NAMES:
        assert getattr(raftlog, name) is not None
        assert name in dir(raftlog)
    assert aio.__all__ == ["Admin", "BatchDelivery", "Consumer", "DelayQueue", "Delivery", "Producer", "read_table"]
    with pytest.raises(AttributeError, match="Produzer"):
        raftlog.Produzer  # noqa: B018 # the access raises


@pytest.mark.parametrize("name", ["Admin", "Consumer", "DelayQueue", "Producer"])
def test_the_asynchronous_classes_have_the_same_methods_and_arguments(name: str) -> None:
    def public(cls: type) -> dict[str, list[str]]:
        return {
            method: list(inspect.signature(function).parameters)
            for method, function in inspect.getmembers(cls, inspect.isfunction)
            if not method.startswith("_") or method == "__init__"
        }

    assert public(getattr(raftlog, name)) == public(getattr(aio, name))


@pytest.mark.parametrize("name", ["Admin", "BatchDelivery", "Consumer", "DelayQueue", "Delivery", "Producer"])
def test_every_public_method_is_documented(name: str) -> None:
    for module in (raftlog, aio):
        cls = getattr(module, name)
        assert cls.__doc__
        for method, function in inspect.getmembers(cls, inspect.isfunction):
            assert method.startswith("_") or function.__doc__, f"{module.__name__}.{name}.{method}"


def test_importing_raftlog_brings_neither_grpc_nor_arrow() -> None:
    """Fork after gRPC started: PySpark forks its workers after importing."""
    code = (
        "import sys, raftlog, raftlog.types; raftlog.TopicPartition, raftlog.Record; "
        "print([name for name in ('grpc', 'pyarrow', 'numpy', 'google.protobuf') if name in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
