"""The coordinators of transactions and staged batches on this broker: a shard of __transaction_state each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import ClassVar, TypeAlias

from broker.clock import Clock
from broker.coordinator.shard import Shard
from broker.coordinators import Coordinators
from broker.internal_topics import TRANSACTION_STATE
from broker.lease import Lease
from broker.marker_sender import MarkerDesk, MarkerSender
from broker.transactions.checks import check_id
from broker.transactions.commands import Command
from broker.transactions.config import TransactionConfig
from broker.transactions.coordinator import TransactionCoordinator
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage

TransactionShard: TypeAlias = Shard[Command, object]


class TransactionCoordinators(Coordinators[Command, object]):
    """All shards of __transaction_state on this broker; `markers` tells others what they decide."""

    TOPIC: ClassVar[str] = TRANSACTION_STATE
    WHAT: ClassVar[str] = "transactional or sink id"

    def __init__(
        self,
        node_id: int,
        image: Callable[[], MetadataImage],
        config: TransactionConfig,
        markers: MarkerSender,
        *,
        executor: Executor,
        clock: Clock,
        lease: Lease,
    ) -> None:
        self._config = config
        self._markers = markers
        super().__init__(node_id, image, executor=executor, clock=clock, lease=lease)

    def _make_core(self, partition: int) -> TransactionCoordinator:
        # Whichever shard of the partition is there when the core has something to tell is the one that runs it.
        return TransactionCoordinator(self._config, MarkerDesk(self._markers, partial(self._shards.find, partition)))

    def _topics(self) -> object:
        return None

    def _check(self, key: str) -> None:
        check_id("transactional id or sink id", key)

    def on_metadata(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Go to new leaders with what has to be told; the coordinators themselves know nothing of topics."""
        self._image = image
        self._markers.on_metadata(image)
