"""A broker's role in replication: it serves its followers, and fetches from the leaders it follows.

Made after the broker's registration, since both ends of a stream send the broker epoch.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Executor
from typing import Final

from broker.config.config import BrokerConfig
from broker.replicas.replica_manager import ReplicaManager
from raftlog._client.security import ChannelTls
from raftlog.config import MAX_INT64
from raftlog.errors import BrokerUnavailable, StaleBrokerEpoch
from raftmeta.image import MetadataImage
from raftmeta.port import MetadataPort
from raftmeta.quorum.config import Endpoint
from raftmeta.quorum.peer_identity import check_claim
from raftmeta.topic_configs import FOLLOWER_THROTTLE_RATE, LEADER_THROTTLE_RATE
from replication.follower_session import FollowerOptions
from replication.pacing import LiveTraffic
from replication.ports import Replica
from replication.shell.fetchers import ReplicaFetchers
from replication.shell.service import LedPartitions, ReplicationService, now_ms
from replication.token_bucket import TokenBucket

NO_LIMIT: Final = MAX_INT64
"""The throttle keys' value for no throttle."""


class ReplicationRole:
    """Both ends of this broker's `Replicate` streams; `on_metadata` keeps addresses and throttles current."""

    def __init__(
        self,
        config: BrokerConfig,
        metadata: MetadataPort,
        registry: ReplicaManager,
        service: ReplicationService,
        reads: Executor,
        broker_epoch: int,
        tls: ChannelTls | None = None,
    ) -> None:
        self._config = config
        self._metadata = metadata
        self._registry = registry
        self._service = service
        self._reads = reads
        self._sends = TokenBucket()
        self._receives = TokenBucket()
        self._live = LiveTraffic()
        self._image = MetadataImage()
        self.fetchers = ReplicaFetchers(
            Replica(config.node_id, broker_epoch),
            metadata.image.cluster_id,
            self._address_of,
            options=FollowerOptions(
                credit_bytes=config.replica_credit_bytes, max_frame_bytes=config.replica_fetch_max_bytes
            ),
            throttle=self._receives,
            live=self._live,
            tls=tls,
        )

    def open(self) -> None:
        """Serve followers from now on."""
        self.on_metadata(self._metadata.image)
        self._service.open(
            LedPartitions(
                me=self._config.node_id,
                cluster_id=self._metadata.image.cluster_id,
                find=self._registry.find,
                check_replica=self._check_replica,
                reads=self._reads,
                max_frame_bytes=self._config.replica_fetch_max_bytes,
                throttle=self._sends,
                live=self._live,
            )
        )

    def on_metadata(self, image: MetadataImage) -> None:
        """Apply new addresses and throttles."""
        before, self._image = self._image, image
        if image.brokers is not before.brokers:
            self.fetchers.endpoints_changed()
        if image.configs is not before.configs or before.offset == 0:
            for key, bucket in ((LEADER_THROTTLE_RATE, self._sends), (FOLLOWER_THROTTLE_RATE, self._receives)):
                rate = throttle_rate(image, self._config, key)
                if rate != bucket.rate_bytes_per_s:
                    bucket.set_rate(rate, now_ms())

    def throttles(self) -> dict[str, TokenBucket]:
        """Return the throttles by Kafka's name."""
        return {"leader_replication": self._sends, "follower_replication": self._receives}

    async def close(self) -> None:
        """End all streams of both kinds."""
        self._service.close()
        await self.fetchers.close()

    def _address_of(self, broker_id: int) -> str | None:
        return address_of(self._metadata.image, self._config.inter_node_routes, broker_id)

    def _check_replica(self, replica: Replica) -> None:
        check_claim(replica.broker_id)
        check_replica(self._metadata.image, self._config.node_id, replica)


def address_of(image: MetadataImage, routes: Mapping[int, tuple[str, int]], broker_id: int) -> str | None:
    """Return a broker's inter-node address: its `inter.node.routes` entry, else its own; None if unknown."""
    route = routes.get(broker_id)
    if route is not None:
        return Endpoint(*route).address
    broker = image.brokers.get(broker_id)
    if broker is None or not broker.inter_node_host:
        return None
    return Endpoint(broker.inter_node_host, broker.inter_node_port).address


def check_replica(image: MetadataImage, me: int, replica: Replica) -> None:
    """Check a follower's broker epoch against the image (KIP-903).

    Raises:
        StaleBrokerEpoch: the follower's broker has since registered anew.
        BrokerUnavailable: the registration has not reached broker `me` yet.
    """
    broker = image.brokers.get(replica.broker_id)
    if broker is None or broker.broker_epoch < replica.broker_epoch:
        raise BrokerUnavailable(
            f"broker {me} does not know yet that broker {replica.broker_id} registered with epoch "
            f"{replica.broker_epoch}; try again"
        )
    if broker.broker_epoch > replica.broker_epoch:
        raise StaleBrokerEpoch(
            f"broker {replica.broker_id} has registered anew with epoch {broker.broker_epoch} since epoch "
            f"{replica.broker_epoch}"
        )


def throttle_rate(image: MetadataImage, config: BrokerConfig, key: str) -> int | None:
    """Return a replication throttle in bytes a second, dynamic before static; None for no limit."""
    dynamic = image.broker_configs(config.node_id).get(key)
    rate = int(dynamic) if dynamic is not None else config.values[key]
    assert isinstance(rate, int), "a rate is a number of bytes"
    return None if rate == NO_LIMIT else rate
