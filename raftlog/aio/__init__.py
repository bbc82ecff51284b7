"""The same clients for asyncio: same names, awaitable, on the caller's own event loop.

`await producer.send(...)` waits only while `buffer.memory` is full, and returns the delivery; awaiting the delivery
returns the `RecordMetadata`:

    async with raftlog.aio.Producer("127.0.0.1:9092") as producer:
        delivery = await producer.send("greetings", b"hello")
        metadata = await delivery
"""

from raftlog._delivery import AsyncBatchDelivery as BatchDelivery
from raftlog._delivery import AsyncDelivery as Delivery
from raftlog.aio._admin import Admin
from raftlog.aio._consumer import Consumer, read_table
from raftlog.aio._delay_queue import DelayQueue
from raftlog.aio._producer import Producer

__all__ = ["Admin", "BatchDelivery", "Consumer", "DelayQueue", "Delivery", "Producer", "read_table"]
