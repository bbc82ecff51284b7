"""The internal topics: the first broker that needs one creates it.

Clients may read and describe them; they cannot write to them, delete them, or change the number of partitions.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import dataclass
from typing import Final

from broker.config.config import BrokerConfig
from raftlog._core.security.acls import INTERNAL_PREFIX
from raftlog.errors import CoordinatorNotAvailable, InvalidTopic, RaftlogError, TopicAlreadyExists
from raftlog.v1.records_pb2 import CreateTopicCommand, MetadataCommand
from raftmeta.image import MetadataImage, TopicImage
from raftmeta.port import MetadataPort

logger = logging.getLogger(__name__)

CONSUMER_OFFSETS: Final = "__consumer_offsets"
TRANSACTION_STATE: Final = "__transaction_state"
AUDIT: Final = "__audit"
SETTLE_S: Final = 10.0
"""How long a broker that cannot know the size of the cluster waits for others, after the first need of the topic."""
WAIT_S: Final = 3.0
"""How long a caller waits for a topic before it is told that the topic is being made."""


def refuse_internal(name: str, what: str) -> None:
    """Refuse a client's change of an internal topic.

    Raises:
        InvalidTopic: the name is an internal topic's.
    """
    if name.startswith(INTERNAL_PREFIX):
        raise InvalidTopic(f"topic {name[:249]!r} is raftlog's own: it can be read, but {what}")


def replicas_needed(image: MetadataImage, replication_factor: int, *, is_set: bool, voters: int) -> int:
    """Return the number of replicas of an internal topic.

    A configured number counts, even with fewer brokers. Otherwise it is the default, or the number of brokers if that
    is less: of those that have registered, or, if the controllers are brokers too, of the `voters`.
    """
    if is_set:
        return replication_factor
    return max(1, min(replication_factor, max(len(image.brokers), voters)))


@dataclass(frozen=True, slots=True)
class Plan:
    """The settings of an internal topic. `min_isr` is lowered to what its replicas allow; None: as other topics.

    `retention_ms`: how long records are kept; None: the topic is compacted.
    """

    name: str
    partitions: int
    replication_factor: int
    replication_factor_key: str
    segment_bytes: int
    min_isr: int | None = None
    retention_ms: int | None = None

    def configs(self, replicas: int) -> dict[str, str]:
        """Return the topic's own configs."""
        configs = {"cleanup.policy": "compact", "segment.bytes": str(self.segment_bytes)}
        if self.retention_ms is not None:
            configs |= {"cleanup.policy": "delete", "retention.ms": str(self.retention_ms)}
        if self.min_isr is not None:
            configs["min.insync.replicas"] = str(min(self.min_isr, replicas))
        return configs


def plans(config: BrokerConfig) -> dict[str, Plan]:
    """Return the plan of each internal topic, by its name."""
    all_of_them = (
        Plan(
            CONSUMER_OFFSETS,
            config.offsets_topic_num_partitions,
            config.offsets_topic_replication_factor,
            "offsets.topic.replication.factor",
            config.offsets_topic_segment_bytes,
        ),
        Plan(
            TRANSACTION_STATE,
            config.transaction_state_log_num_partitions,
            config.transaction_state_log_replication_factor,
            "transaction.state.log.replication.factor",
            config.transaction_state_log_segment_bytes,
            config.transaction_state_log_min_isr,
        ),
        Plan(
            AUDIT,
            config.audit_topic_num_partitions,
            config.audit_topic_replication_factor,
            "audit.topic.replication.factor",
            config.audit_topic_segment_bytes,
            retention_ms=config.audit_topic_retention_ms,
        ),
    )
    return {plan.name: plan for plan in all_of_them}


class InternalTopics:
    """Makes each internal topic when it is needed first. On the event loop."""

    def __init__(self, metadata: MetadataPort, config: BrokerConfig) -> None:
        self._makers = {name: _Maker(metadata, config, plan) for name, plan in plans(config).items()}

    async def consumer_offsets(self) -> TopicImage:
        """Return the topic of the groups, made if need be. Raises as `needed`."""
        return await self.needed(CONSUMER_OFFSETS)

    async def transaction_state(self) -> TopicImage:
        """Return the topic of the transactions, made if need be. Raises as `needed`."""
        return await self.needed(TRANSACTION_STATE)

    async def needed(self, name: str) -> TopicImage:
        """Return one of the internal topics, made if need be.

        Raises:
            CoordinatorNotAvailable: it is being made, or cannot be; says what is missing.
        """
        return await self._makers[name].needed()

    async def close(self) -> None:
        """Stop asking."""
        await asyncio.gather(*(maker.close() for maker in self._makers.values()))


class _Maker:
    """Makes one internal topic.

    absent -> being made   `needed` is called
    being made -> there    the image shows it, made by any broker
    being made -> absent   refused; the next caller gets the reason, and starts another attempt

    If the controllers are not brokers, the size of the cluster is unknown, and the first broker would make a topic with
    one replica for good. So it waits for others, and logs what to do if none come.
    """

    def __init__(self, metadata: MetadataPort, config: BrokerConfig, plan: Plan) -> None:
        self._metadata = metadata
        self._plan = plan
        self._is_set = plan.replication_factor_key in config.static_keys
        self._voters = len(config.controller_quorum_voters) if config.is_controller else 0
        self._is_controller = config.is_controller
        self._task: asyncio.Task[None] | None = None
        self._needed_s: float | None = None

    async def needed(self) -> TopicImage:
        """Return the topic, see `InternalTopics.needed`."""
        name = self._plan.name
        found = self._metadata.image.topic(name)
        if found is not None:
            return found
        if self._task is None or self._task.done():
            self._check_brokers()
            self._task = asyncio.get_running_loop().create_task(self._create(), name=f"create-{name}")
        await asyncio.wait((self._task,), timeout=WAIT_S)
        found = self._metadata.image.topic(name)
        if found is not None:
            return found
        if self._task.done() and not self._task.cancelled() and (error := self._task.exception()) is not None:
            raise CoordinatorNotAvailable(f"{name} cannot be made: {error}") from error
        raise CoordinatorNotAvailable(f"{name} is being made; try again")

    def _replicas(self) -> int:
        return replicas_needed(
            self._metadata.image, self._plan.replication_factor, is_set=self._is_set, voters=self._voters
        )

    def _check_brokers(self) -> None:
        plan = self._plan
        needed, brokers = self._replicas(), self._metadata.image.brokers.values()
        up = sum(broker.takes_replicas for broker in brokers)
        if up < needed:
            set_aside = sum(broker.active for broker in brokers) - up
            undo = f", uncordon or undrain those {set_aside} that are set aside" if set_aside else ""
            raise CoordinatorNotAvailable(
                f"{plan.name} needs {needed} brokers to be made, {up} "
                f"{'is' if up == 1 else 'are'} up{' and may have replicas' if set_aside else ''}; start more{undo}, "
                f"or set {plan.replication_factor_key}"
            )
        if self._guesses(needed):
            now_s = asyncio.get_running_loop().time()
            if self._needed_s is None:
                self._needed_s = now_s
            if now_s < self._needed_s + SETTLE_S:
                raise CoordinatorNotAvailable(
                    f"{plan.name} waits up to {SETTLE_S:g} s for more brokers than {up}, so that it gets "
                    f"{plan.replication_factor} replicas; set {plan.replication_factor_key} if this is all"
                )

    def _guesses(self, replicas: int) -> bool:
        """Whether this number is low only because brokers are missing at the moment."""
        return not self._is_set and not self._is_controller and replicas < self._plan.replication_factor

    async def _create(self) -> None:
        plan, replicas = self._plan, self._replicas()
        command = CreateTopicCommand(
            name=plan.name,
            topic_id=uuid.uuid4().bytes,
            partitions=plan.partitions,
            replication_factor=replicas,
            configs=plan.configs(replicas),
        )
        try:
            result = await self._metadata.propose(MetadataCommand(create_topic=command))
        except TopicAlreadyExists:
            return  # another broker was asked at the same time
        except RaftlogError as error:
            logger.warning("%s was not made: %s", plan.name, error)
            raise
        if self._guesses(replicas):
            logger.warning(
                "%s is made with %d of %d replicas, since no more brokers are up; set %s if that is meant, "
                "or start more brokers and reassign its partitions to them",
                plan.name,
                replicas,
                plan.replication_factor,
                plan.replication_factor_key,
            )
        logger.info(
            "internal topic made",
            extra={
                "event": "internal_topic_made",
                "topic": plan.name,
                "partitions": plan.partitions,
                "replication_factor": replicas,
                "metadata_offset": result.offset,
            },
        )

    async def close(self) -> None:
        """Stop asking."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
