"""What a broker's parts have to tell at `/metrics`, put together."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

from broker.clock import Clock
from broker.config import BrokerConfig
from broker.group_coordinators import GroupCoordinators
from broker.lease import ServingLease
from broker.log.manager import LogManager
from broker.observability.broker_families import BrokerFamilies
from broker.observability.group_families import GroupFamilies
from broker.observability.group_lag import GroupLagSampler
from broker.observability.leader_offsets import LeaderOffsets
from broker.observability.load_families import LoadFamilies
from broker.observability.node import Observability
from broker.registry import PartitionRegistry
from broker.transaction_coordinators import TransactionCoordinators
from raftmeta.port import MetadataPort
from replication.token_bucket import TokenBucket


def show_broker(
    observed: Observability,
    config: BrokerConfig,
    metadata: MetadataPort,
    registry: PartitionRegistry,
    logs: LogManager,
    lease: ServingLease,
    groups: GroupCoordinators,
    transactions: TransactionCoordinators,
    throttles: Callable[[], Mapping[str, TokenBucket]],
) -> None:
    """Show the partitions, requests, disks, queues and caches of a broker from now on."""
    observed.registry.register(
        BrokerFamilies(
            config.node_id,
            observed.counters,
            lambda: metadata.image,
            registry.partitions,
            logs,
            config.log_dirs,
            lease.valid,
        )
    )
    observed.registry.register(
        LoadFamilies(
            observed.counters,
            registry.partitions,
            {"group": groups.shards, "transaction": transactions.shards},
            throttles,
            logs.segments,
            lambda: max(0, metadata.image.offset - max(0, registry.applied_offset)),
        )
    )


@asynccontextmanager
async def group_lag_shown(
    observed: Observability, config: BrokerConfig, clock: Clock, groups: GroupCoordinators, leaders: LeaderOffsets
) -> AsyncIterator[None]:
    """Show how far groups are behind, if there is a `metrics.listener` and an interval; closes `leaders`."""
    try:
        if config.metrics_listener is None or not config.metrics_group_lag_interval_ms:
            yield
            return
        sampler = GroupLagSampler(groups.groups, leaders, clock, config.metrics_group_lag_interval_ms)
        observed.registry.register(GroupFamilies(lambda: sampler.figures))
        sampler.start()
        try:
            yield
        finally:
            await sampler.close()
    finally:
        await leaders.close()
