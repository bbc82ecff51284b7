"""What tests of a producer's transactions share: a fake cluster with one topic, and producers in a hurry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from raftlog import Producer
from tests.support.fake_broker import FakeCluster
from tests.support.fake_transactions import TransactionCluster

FAST: Final[dict[str, Any]] = {
    "linger_ms": 0.5,
    "retry_backoff_ms": 1,
    "retry_backoff_max_ms": 20,
    "max_block_ms": 120_000,
}
INIT: Final = "InitProducerId"
ADD: Final = "AddToTransaction"
END: Final = "EndTransaction"


@contextmanager
def transaction_cluster() -> Iterator[TransactionCluster]:
    """Two nodes with the topic `t` of 3 partitions; at the end no rule of transactions may be broken."""
    with TransactionCluster(nodes=2) as cluster:
        cluster.create_topic("t", 3)
        yield cluster
        assert cluster.transactions.violations == [], (
            f"the transactions broke their promises: {cluster.transactions.violations}"
        )


def make(cluster: FakeCluster, transactional_id: str = "x", **options: Any) -> Producer:
    """Return a producer that waits for little."""
    return Producer(cluster.bootstrap, transactional_id=transactional_id, **{**FAST, **options})
