"""raftlog: a replicated, durable log broker for Python and Spark. This package is its SDK.

    from raftlog import Admin, Consumer, Producer

    Admin("127.0.0.1:9092").create_topic("greetings")
    with Producer("127.0.0.1:9092") as producer:
        producer.send("greetings", b"hello").result(timeout=10)
    with Consumer("127.0.0.1:9092", auto_offset_reset="earliest") as consumer:
        consumer.subscribe("greetings")
        for record in consumer:
            print(record.value)

The same classes for asyncio are in `raftlog.aio`, a cluster for tests in `raftlog.testing`, all errors in
`raftlog.errors`. Names are imported when they are first used, so that `import raftlog` costs next to nothing and
touches neither gRPC nor Arrow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from raftlog.types import (
    VERSION,
    GroupMetadata,
    OffsetAndMetadata,
    OffsetAndTimestamp,
    Record,
    RecordMetadata,
    TopicPartition,
)

if TYPE_CHECKING:
    from raftlog import aio, errors, testing
    from raftlog._admin import Admin
    from raftlog._client.keywords import (
        Acks,
        AdminKeywords,
        Compression,
        ConsumerKeywords,
        IsolationLevel,
        OffsetReset,
        ProducerKeywords,
        StageKeywords,
    )
    from raftlog._consumer import Consumer, RebalanceListener, read_table
    from raftlog._core.staging import CommittedBatch, StageToken
    from raftlog._delay_queue import DelayQueue
    from raftlog._delivery import BatchDelivery, Delivery, RecordRange
    from raftlog._producer import Producer
    from raftlog._staged_writer import Stage, StagedWriter
    from raftlog.errors import RaftlogError
    from raftlog.security import (
        AclBinding,
        AclFilter,
        AclOperation,
        AclPermission,
        PatternType,
        QuotaEntity,
        ResourceType,
        Role,
        ScramMechanism,
        UserScramCredential,
    )


__version__ = VERSION

__all__ = [
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

_MODULE_OF = {
    "Acks": "raftlog._client.keywords",
    "AclBinding": "raftlog.security",
    "AclFilter": "raftlog.security",
    "AclOperation": "raftlog.security",
    "AclPermission": "raftlog.security",
    "Admin": "raftlog._admin",
    "AdminKeywords": "raftlog._client.keywords",
    "BatchDelivery": "raftlog._delivery",
    "CommittedBatch": "raftlog._core.staging",
    "Compression": "raftlog._client.keywords",
    "Consumer": "raftlog._consumer",
    "ConsumerKeywords": "raftlog._client.keywords",
    "DelayQueue": "raftlog._delay_queue",
    "Delivery": "raftlog._delivery",
    "IsolationLevel": "raftlog._client.keywords",
    "OffsetReset": "raftlog._client.keywords",
    "PatternType": "raftlog.security",
    "Producer": "raftlog._producer",
    "ProducerKeywords": "raftlog._client.keywords",
    "QuotaEntity": "raftlog.security",
    "RaftlogError": "raftlog.errors",
    "RebalanceListener": "raftlog._consumer",
    "RecordRange": "raftlog._delivery",
    "ResourceType": "raftlog.security",
    "Role": "raftlog.security",
    "ScramMechanism": "raftlog.security",
    "Stage": "raftlog._staged_writer",
    "StageKeywords": "raftlog._client.keywords",
    "StageToken": "raftlog._core.staging",
    "StagedWriter": "raftlog._staged_writer",
    "UserScramCredential": "raftlog.security",
    "read_table": "raftlog._consumer",
}
_SUBMODULES = frozenset({"aio", "errors", "testing"})


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"raftlog.{name}")
    module = _MODULE_OF.get(name)
    if module is None:
        raise AttributeError(f"module 'raftlog' has no attribute {name!r}")
    found = getattr(importlib.import_module(module), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
