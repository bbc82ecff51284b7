"""At least once: a task sends its rows and waits for every acknowledgement before it reports success.

Spark repeats a task or a batch that fails after some of its rows were sent, and those are then in the log twice. What
the producer sends again is there once, since it is idempotent, and what was acknowledged is never lost.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark_raftlog.options import SinkOptions
from pyspark_raftlog.schema import SinkSchema

if TYPE_CHECKING:
    from pyarrow import RecordBatch

    import raftlog

_MAX_UNCHECKED_SENDS: Final = 32
"""A task looks at the outcome of its oldest send when there are more than so many; the producer bounds the memory."""

_producers: dict[tuple[int, SinkOptions], raftlog.Producer] = {}
"""By process id, so that a forked child never uses its parent's; a Python worker of Spark runs many tasks."""


def write(options: SinkOptions, schema: SinkSchema, iterator: Iterator[RecordBatch]) -> int:
    """Send all rows of one task, wait until they are acknowledged, and return how many there were.

    Raises:
        RaftlogError: a record was refused or not acknowledged in time; Spark may try the task again.
    """
    producer = _producer(options)
    rows = 0
    unchecked: deque[Any] = deque()
    try:
        for batch in iterator:
            for topic, records in schema.split(batch):
                unchecked.append(producer.send_batch(topic, records))
                rows += records.num_rows
            while len(unchecked) > _MAX_UNCHECKED_SENDS:
                unchecked.popleft().result()
        producer.flush()
        while unchecked:
            unchecked.popleft().result()
    except BaseException:
        _discard_producer(options)
        raise
    return rows


def _producer(options: SinkOptions) -> raftlog.Producer:
    key = (os.getpid(), options)
    producer = _producers.get(key)
    if producer is None:
        import raftlog

        for other in list(_producers):
            unused = _producers.pop(other)
            if other[0] == os.getpid():
                unused.close(0)  # no task is under way, so nothing is in it
        producer = _producers[key] = raftlog.Producer(options.bootstrap, config=dict(options.producer))
    return producer


def _discard_producer(options: SinkOptions) -> None:
    """Forget a producer that may still hold records of a failed task; the next task gets a new one."""
    producer = _producers.pop((os.getpid(), options), None)
    if producer is not None:
        producer.close(0)
