"""The paths that `bench/regression.py` times, over the public API alone: earlier versions run this file too.

    python regression_paths.py

starts a cluster of three nodes, prints "ready", and then reads lines `PATH COUNT`: it takes a path for about so many
records and prints how many and the seconds as JSON. It ends with standard input. Everything that it starts is a child
of this process, whose CPU time the reader of this output takes.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Coroutine
from typing import Any, Final

from raftlog import Admin, Consumer, Producer, TopicPartition
from raftlog.aio import Producer as AwaitableProducer
from raftlog.testing import Cluster

VALUE: Final = os.urandom(1_000)
MANY: Final = 32
TO_READ: Final = 20_000


class Paths:
    """The paths, on one cluster. Each returns the seconds that the records took."""

    def __init__(self, bootstrap: str, loop: asyncio.AbstractEventLoop) -> None:
        self._bootstrap = bootstrap
        self._loop = loop
        self._topics = 0
        with Admin(bootstrap) as admin:
            for topic in ("bulk", "each", "read"):
                admin.create_topic(topic, 1, 3)
        self.produce("read", TO_READ)

    def produce(self, topic: str, count: int) -> float:
        with Producer(self._bootstrap) as producer:
            producer.send(topic, VALUE).result(60)
            begun_s = time.perf_counter()
            for _ in range(count):
                producer.send(topic, VALUE)
            producer.flush(600)
            return time.perf_counter() - begun_s

    def one_by_one(self, producers: int, count: int) -> float:
        return self._loop.run_until_complete(self._one_by_one(producers, count))

    async def _one_by_one(self, count: int, records: int) -> float:
        producers = [AwaitableProducer(self._bootstrap) for _ in range(count)]

        async def send(producer: Any, of_each: int) -> None:
            for _ in range(of_each):
                await (await producer.send("each", VALUE))

        async def all_of(of_each: int) -> None:
            sending: list[Coroutine[Any, Any, None]] = [send(producer, of_each) for producer in producers]
            await asyncio.gather(*sending)

        await all_of(2)
        begun_s = time.perf_counter()
        await all_of(records // count)
        took_s = time.perf_counter() - begun_s
        for producer in producers:
            await producer.close()
        return took_s

    def consume(self, count: int, take: Callable[[Any], int]) -> float:
        took_s, left = 0.0, count
        while left > 0:
            with Consumer(self._bootstrap, group_id=None) as consumer:
                consumer.assign([TopicPartition("read", 0)])
                consumer.seek(TopicPartition("read", 0), 0)
                begun_s = time.perf_counter()
                rows = 0
                while rows < min(left, TO_READ):
                    rows += take(consumer)
                took_s += time.perf_counter() - begun_s
                left -= rows
        return took_s

    def topics(self, count: int) -> float:
        with Admin(self._bootstrap) as admin:
            begun_s = time.perf_counter()
            for _ in range(count):
                self._topics += 1
                admin.create_topic(f"new-{self._topics}", 1, 3)
                admin.delete_topic(f"new-{self._topics}")
            return time.perf_counter() - begun_s

    def take(self, path: str, count: int) -> float:
        """Take a path for so many records."""
        return {
            "produce": lambda: self.produce("bulk", count),
            "one-by-one": lambda: self.one_by_one(1, count),
            "one-by-one-of-32": lambda: self.one_by_one(MANY, count),
            "poll": lambda: self.consume(count, lambda consumer: len(consumer.poll(1.0))),
            "poll-arrow": lambda: self.consume(count, lambda consumer: int(consumer.poll_arrow(1.0).num_rows)),
            "topics": lambda: self.topics(count),
        }[path]()


def main() -> None:
    """Serve standard input."""
    loop = asyncio.new_event_loop()
    with Cluster(nodes=3) as cluster:
        paths = Paths(cluster.bootstrap, loop)
        print("ready", flush=True)
        for line in sys.stdin:
            path, count = line.split()
            print(json.dumps({"count": int(count), "seconds": paths.take(path, int(count))}), flush=True)


if __name__ == "__main__":
    main()
