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

from raftlog.types import OffsetAndTimestamp, Record, RecordMetadata, TopicPartition

if TYPE_CHECKING:
    from raftlog import aio, errors, testing
    from raftlog._admin import Admin
    from raftlog._consumer import Consumer
    from raftlog._delivery import BatchDelivery, Delivery, RecordRange
    from raftlog._producer import Producer
    from raftlog.errors import RaftlogError

__version__ = "0.1.0"

__all__ = [
    "Admin",
    "BatchDelivery",
    "Consumer",
    "Delivery",
    "OffsetAndTimestamp",
    "Producer",
    "RaftlogError",
    "Record",
    "RecordMetadata",
    "RecordRange",
    "TopicPartition",
    "aio",
    "errors",
    "testing",
]

_MODULE_OF = {
    "Admin": "raftlog._admin",
    "BatchDelivery": "raftlog._delivery",
    "Consumer": "raftlog._consumer",
    "Delivery": "raftlog._delivery",
    "Producer": "raftlog._producer",
    "RaftlogError": "raftlog.errors",
    "RecordRange": "raftlog._delivery",
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
