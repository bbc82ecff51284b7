"""The coordinators of transactions and staged batches on this broker: a shard of __transaction_state each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import ClassVar

from broker.clock import Clock
from broker.coordinator.internal_topics import TRANSACTION_STATE
from broker.coordinator.shards import Coordinators
from broker.coordinator.transactions.checks import check_id
from broker.coordinator.transactions.commands import Command, TransactionConfig
from broker.coordinator.transactions.coordinator import TransactionCoordinator
from broker.coordinator.transactions.marker_sender import MarkerDispatch, MarkerSender
from broker.coordinator.user_bound import NamedGroups, owed_bound
from broker.server.lease import Lease
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.image import MetadataImage


class TransactionCoordinators(Coordinators[Command, object]):
    """All shards of __transaction_state on this broker; `markers` sends the markers of their decisions."""

    TOPIC: ClassVar[str] = TRANSACTION_STATE
    WHAT: ClassVar[str] = "transactional or sink id"
    LIMIT: ClassVar[str] = "max.transactional.ids.per.user"
    COUNTED: ClassVar[str] = "transactional ids and sinks"

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
        most_of_user: int,
        named: NamedGroups | None = None,
    ) -> None:
        """`named`: as `TransactionCoordinator`."""
        self._config = config
        self._named = named
        self._owed_bound = owed_bound(self._owed_by)
        self._markers = markers
        super().__init__(node_id, image, executor=executor, clock=clock, lease=lease, most_of_user=most_of_user)

    def _make_core(self, partition: int) -> TransactionCoordinator:
        # Whichever shard of the partition is there when the core has something to tell is the one that runs it.
        return TransactionCoordinator(
            self._config,
            MarkerDispatch(self._markers, partial(self._shards.find, partition)),
            self.bound,
            self._named,
            self._owed_bound,
        )

    def _owed_by(self, user: str) -> int:
        cores = (shard.core for _, shard in self.shards())
        return sum(core.owed.get(user, 0) for core in cores if isinstance(core, TransactionCoordinator))

    def _topics(self) -> object:
        return None

    def _check(self, key: str) -> None:
        check_id("transactional id or sink id", key)

    def on_metadata(self, image: MetadataImage, records: Sequence[MetadataRecord] | None) -> None:
        """Send unwritten markers to new leaders; the coordinators themselves do not use the metadata of topics."""
        self._image = image
        self._markers.on_metadata(image)
