"""Examples in documents poll once and take what comes for all there is: here a poll goes on until that is so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from raftlog import Consumer, Record, aio

_WAIT_S = 60.0


@contextmanager
def patient_polls(monkeypatch: pytest.MonkeyPatch, bootstrap: str, *, gathering: bool) -> Iterator[None]:
    """Have no poll come back with nothing while there is something; `gathering`: nor with less than there is.

    What there is ends where the logs do: decisions about transactions are waited for. For a minute at most.
    """
    poll, aio_poll = Consumer.poll, aio.Consumer.poll
    with Consumer(bootstrap, isolation_level="read_uncommitted") as whole, monkeypatch.context() as patch:

        def at_end(consumer: Consumer) -> bool:
            ends = whole.end_offsets(set(consumer.assignment()) - set(consumer.paused()))
            return all(consumer.position(partition) >= end for partition, end in ends.items())

        async def aio_at_end(consumer: aio.Consumer) -> bool:
            ends = whole.end_offsets(set(consumer.assignment()) - set(consumer.paused()))
            return all([await consumer.position(partition) >= end for partition, end in ends.items()])

        def polled(self: Consumer, timeout: float | None = 1.0, max_records: int | None = None) -> list[Record]:
            deadline_s = time.monotonic() + _WAIT_S
            found = poll(self, timeout, max_records)
            while (gathering or not found) and not at_end(self) and time.monotonic() < deadline_s:
                found += poll(self, timeout, max_records)
            return found

        async def aio_polled(
            self: aio.Consumer, timeout: float | None = 1.0, max_records: int | None = None
        ) -> list[Record]:
            deadline_s = time.monotonic() + _WAIT_S
            found = await aio_poll(self, timeout, max_records)
            while (gathering or not found) and not await aio_at_end(self) and time.monotonic() < deadline_s:
                found += await aio_poll(self, timeout, max_records)
            return found

        patch.setattr(Consumer, "poll", polled)
        patch.setattr(aio.Consumer, "poll", aio_polled)
        yield
