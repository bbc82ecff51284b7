"""The `Metadata` service: the cluster's brokers and topics, once (`Get`) or as they change (`Watch`)."""

from __future__ import annotations

import asyncio
import difflib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NoReturn

import grpc
from grpc import aio

from broker.coordinator.internal_topics import AUDIT, CONSUMER_OFFSETS, TRANSACTION_STATE
from broker.security.caller import MAX_NAME, Caller, Decisions, authorized_operations, caller
from broker.turns import in_turns
from raftlog import __version__
from raftlog._client.connections import refuse
from raftlog._core.security.acls import CLUSTER_NAME
from raftlog.errors import (
    BrokerOverloaded,
    InvalidRequestError,
    RaftlogError,
    RequestTimedOut,
    TopicAuthorizationFailed,
    UnknownTopicId,
    UnknownTopicOrPartition,
    to_wire,
)
from raftlog.format.header import MAGIC
from raftlog.v1 import metadata_pb2, metadata_pb2_grpc
from raftlog.v1.records_pb2 import MetadataRecord
from raftlog.v1.security_pb2 import Acl
from raftmeta.features import BASELINE, supported_ranges
from raftmeta.image import MetadataImage, PartitionImage, TopicImage
from raftmeta.port import Change, MetadataPort

logger = logging.getLogger(__name__)

MAX_WATCHERS: Final = 1_000
MAX_RESPONSE_RECORDS: Final = 5_000
"""Records in one response of a watch, typically some hundred KiB."""
MAX_RESPONSE_BYTES: Final = 1 << 20
"""Bound on a response of a snapshot, well below gRPC's own limit."""
WRITE_TIMEOUT_SECONDS: Final = 30.0
CREDENTIALS: Final = frozenset({"scram_credential", "remove_scram_credential", "producer_id_key"})
"""Records that are never sent to clients."""
MAX_NAMED: Final = 10_000
"""Topics that one request may name; clients split longer ones."""
HINT_TOPICS: Final = 5_000
"""Topics of a cluster up to which a misspelt name gets a hint."""
HINT_NAMES: Final = 100
"""Names that a misspelt one is compared with."""
HINT_EDITS: Final = 2
"""By how many characters their lengths may differ."""
HINT_LIKENESS: Final = 0.75
CATCH_UP_SECONDS: Final = 2.0
"""How long a request waits until this node has reached the request's `min_metadata_offset`."""

_Context = aio.ServicerContext[Any, Any]


class MetadataService(metadata_pb2_grpc.MetadataServicer):
    """Serves the committed image of one node.

    A watcher has no queue, only an offset; the changes above it come from a history that all watchers share. A watcher
    that falls behind this history starts over with a snapshot. A watcher that reads nothing for
    `write_timeout_seconds` is cut off.

    Clients see the topics that they may describe. Only nodes (`to_nodes`), which need the whole metadata, receive
    credentials; the clients' listener never sends any, not even to a super user.

    `ApiVersions` answers with `sasl_mechanisms` and `methods`, which are those of the listener that this serves.
    """

    def __init__(
        self,
        metadata: MetadataPort,
        *,
        to_nodes: bool = False,
        sasl_mechanisms: Sequence[str] = (),
        methods: Callable[[], Iterable[str]] = tuple,
        max_watchers: int = MAX_WATCHERS,
        max_response_records: int = MAX_RESPONSE_RECORDS,
        write_timeout_seconds: float = WRITE_TIMEOUT_SECONDS,
    ) -> None:
        self._metadata = metadata
        self._to_nodes = to_nodes
        self._sasl_mechanisms = sasl_mechanisms
        self._methods = methods
        self._max_watchers = max_watchers
        self._max_response_records = max_response_records
        self._write_timeout_seconds = write_timeout_seconds
        self._watchers = 0

    async def Get(self, request: metadata_pb2.MetadataRequest, context: _Context) -> metadata_pb2.MetadataResponse:
        """Return the brokers and the requested topics, at `min_metadata_offset` or later."""
        try:
            _check_bounds(request)
            image = await image_from(self._metadata, request.min_metadata_offset)
        except RaftlogError as error:
            return metadata_pb2.MetadataResponse(error=to_wire(error))
        response = metadata_pb2.MetadataResponse(
            cluster_id=image.cluster_id,
            controller_id=image.controller_id,
            controller_epoch=image.controller_epoch,
            metadata_offset=image.offset,
            brokers=_brokers(image),
        )
        await _add_topics(response, image, request, caller.get())
        return response

    async def ApiVersions(
        self, request: metadata_pb2.ApiVersionsRequest, context: _Context
    ) -> metadata_pb2.ApiVersionsResponse:
        """Return what this broker speaks on the listener of the call."""
        logger.debug(
            "a client introduced itself",
            extra={
                "software": request.client_software_name[:MAX_NAME],
                "version": request.client_software_version[:MAX_NAME],
                "peer": context.peer(),
            },
        )
        response = metadata_pb2.ApiVersionsResponse(
            broker_software_version=__version__,
            methods=sorted(self._methods()),
            record_formats=[MAGIC],
            sasl_mechanisms=self._sasl_mechanisms,
            supported_features=supported_ranges(),
        )
        for name, level in {**BASELINE, **self._metadata.image.features}.items():
            response.finalized_features[name] = level
        return response

    async def Watch(  # type: ignore[override] # the stub knows generators only; with write() a slow reader shows
        self, request: metadata_pb2.WatchRequest, context: _Context
    ) -> None:
        """Send the changes above the offset, or a snapshot, and then every change in order."""
        if self._watchers >= self._max_watchers:
            await _abort(
                context,
                grpc.StatusCode.RESOURCE_EXHAUSTED,
                BrokerOverloaded(f"this broker serves {self._max_watchers} metadata watchers already"),
            )
        if not await self._watch_until_cut_off(request.from_offset, context):
            return
        # Outside of any `except`: gRPC may deliver the status only when the client reads again, so everything else of
        # this watch is released before.
        logger.info("a metadata watcher was cut off", extra={"peer": context.peer()})
        await _abort(
            context,
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            BrokerOverloaded(f"nothing was read from this watch for {self._write_timeout_seconds:g} s; start it again"),
        )

    async def _watch_until_cut_off(self, from_offset: int, context: _Context) -> bool:
        """Serve one watcher; return True if it has stopped reading."""
        changed = asyncio.Event()
        unsubscribe = self._metadata.subscribe(lambda image, records: changed.set())
        self._watchers += 1
        try:
            await self._watch(from_offset, changed, context)
        except TimeoutError:
            return True
        finally:
            self._watchers -= 1
            unsubscribe()
        return False

    async def _watch(self, offset: int, changed: asyncio.Event, context: _Context) -> None:
        known, who = offset, caller.get()
        while True:
            changed.clear()
            if not who.may(Acl.DESCRIBE, Acl.CLUSTER, CLUSTER_NAME, log=False):  # the permission was revoked
                return
            image = self._metadata.image
            if image.offset > known:  # else the watcher is ahead of this node
                changes = self._metadata.changes_since(known) if known >= 0 else None
                if changes is None or not all(self._fits(change.records) for change in changes):
                    responses = self._snapshot(image)
                else:
                    responses = self._deltas(changes)
                known = image.offset
                for response in responses:
                    async with asyncio.timeout(self._write_timeout_seconds):
                        await context.write(response)
            if self._metadata.image.offset <= known:
                await changed.wait()

    def _fits(self, records: Sequence[MetadataRecord]) -> bool:
        """Whether the records of one change fit into one response; a change is never split."""
        if len(records) > self._max_response_records:
            return False
        return len(records) == 1 or sum(record.ByteSize() for record in records) <= MAX_RESPONSE_BYTES

    def _snapshot(self, image: MetadataImage) -> Iterator[metadata_pb2.WatchResponse]:
        chunks = _chunks(self._shown(image.to_records()), self._max_response_records)
        chunk = next(chunks, [])
        while True:
            following = next(chunks, None)
            yield metadata_pb2.WatchResponse(
                controller_epoch=image.controller_epoch,
                metadata_offset=image.offset,
                snapshot=True,
                more=following is not None,
                records=chunk,
            )
            if following is None:
                return
            chunk = following

    def _deltas(self, changes: Iterable[Change]) -> Iterator[metadata_pb2.WatchResponse]:
        for change in changes:
            yield metadata_pb2.WatchResponse(
                controller_epoch=change.controller_epoch,
                metadata_offset=change.offset,
                records=self._shown(change.records),
            )

    def _shown(self, records: Iterable[MetadataRecord]) -> Iterable[MetadataRecord]:
        if self._to_nodes:
            return records
        return (record for record in records if record.WhichOneof("record") not in CREDENTIALS)


async def image_from(metadata: MetadataPort, min_offset: int) -> MetadataImage:
    """Return the image once it has reached `min_offset`.

    Raises:
        RequestTimedOut: it has not reached it within CATCH_UP_SECONDS.
    """
    if metadata.image.offset >= min_offset:
        return metadata.image
    changed = asyncio.Event()
    unsubscribe = metadata.subscribe(lambda image, records: changed.set())
    try:
        async with asyncio.timeout(CATCH_UP_SECONDS):
            while metadata.image.offset < min_offset:
                changed.clear()
                await changed.wait()
    except TimeoutError:
        raise RequestTimedOut(
            f"this broker has the metadata up to offset {metadata.image.offset}, the request needs {min_offset}; "
            "ask another broker, or try again later"
        ) from None
    finally:
        unsubscribe()
    return metadata.image


def _chunks(records: Iterable[MetadataRecord], size: int) -> Iterator[list[MetadataRecord]]:
    chunk: list[MetadataRecord] = []
    chunk_bytes = 0
    for record in records:
        record_bytes = record.ByteSize()
        if chunk and (len(chunk) == size or chunk_bytes + record_bytes > MAX_RESPONSE_BYTES):
            yield chunk
            chunk, chunk_bytes = [], 0
        chunk.append(record)
        chunk_bytes += record_bytes
    if chunk:
        yield chunk


async def _abort(context: _Context, status: grpc.StatusCode, error: RaftlogError) -> NoReturn:
    await refuse(context, status, error, str(error))


def _brokers(image: MetadataImage) -> list[metadata_pb2.BrokerInfo]:
    return [
        metadata_pb2.BrokerInfo(
            broker_id=broker.broker_id,
            host=broker.host,
            port=broker.port,
            rack=broker.rack,
            fenced=broker.fenced,
            broker_epoch=broker.broker_epoch,
        )
        for _, broker in sorted(image.brokers.items())
    ]


def _check_bounds(request: metadata_pb2.MetadataRequest) -> None:
    named = len(request.topics) + len(request.topic_ids)
    if named > MAX_NAMED:
        raise InvalidRequestError(f"a request for metadata names at most {MAX_NAMED} topics, not {named}: split it")


async def _add_topics(
    response: metadata_pb2.MetadataResponse, image: MetadataImage, request: metadata_pb2.MetadataRequest, who: Caller
) -> None:
    """Add each requested topic once, in request order; an unknown topic carries an error.

    A named topic that the caller may not describe carries an error as well, whether it exists or not. A list of all
    topics leaves such topics out.
    """
    async for topic in in_turns((_all if request.all_topics else _named)(image, request, who)):
        if topic is not None:
            if request.include_authorized_operations and not topic.error.code:
                topic.authorized_operations = authorized_operations(who, Acl.TOPIC, topic.name)
            response.topics.append(topic)


_MADE_BY: Final = {
    AUDIT: "brokers with audit.topic.enable=true make it",
    CONSUMER_OFFSETS: "brokers make it for the first consumer group",
    TRANSACTION_STATE: "brokers make it for the first transaction",
}
"""Internal topics, which clients cannot create."""


def _hint(image: MetadataImage, name: str, who: Caller) -> str:
    """Return a question that names a topic with a similar name, if the caller may describe one.

    Clients ask for missing topics again and again, so a hint takes a millisecond at most: one for a request, among few
    names.
    """
    if len(image.topic_id_by_name) > HINT_TOPICS or len(name) > MAX_NAME:
        return ""
    close = [each for each in image.topic_id_by_name if abs(len(each) - len(name)) <= HINT_EDITS]
    if len(close) > HINT_NAMES:
        close = [each for each in close if each[:1] == name[:1]][:HINT_NAMES]
    describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    for found in difflib.get_close_matches(name, close, cutoff=HINT_LIKENESS):
        if not image.topics[image.topic_id_by_name[found]].internal and (describes is None or describes.allow(found)):
            return f"did you mean {found!r}? If not, "
    return ""


def _all(
    image: MetadataImage, request: metadata_pb2.MetadataRequest, who: Caller
) -> Iterator[metadata_pb2.TopicInfo | None]:
    """Yield every topic, or None for a topic that the caller does not see."""
    describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC, log=False)
    for name in sorted(image.topic_id_by_name):
        topic = image.topics[image.topic_id_by_name[name]]
        shown = request.include_internal or not topic.internal
        yield _topic(image, topic) if shown and (describes is None or describes.allow(name)) else None


def _named(
    image: MetadataImage, request: metadata_pb2.MetadataRequest, who: Caller
) -> Iterator[metadata_pb2.TopicInfo | None]:
    describes = Decisions.of(who, Acl.DESCRIBE, Acl.TOPIC)
    hinted = False
    for name in dict.fromkeys(request.topics):
        found = image.topic(name)
        if describes is not None and not describes.allow(name):
            yield metadata_pb2.TopicInfo(name=name, error=to_wire(describes.refusal(name)))
        elif found is None:
            hint = "" if hinted else _hint(image, name, who)
            hinted = True
            make = _MADE_BY.get(name, "create it first")
            error = UnknownTopicOrPartition(f"there is no topic {name[:249]!r}; {hint}{make}")
            yield metadata_pb2.TopicInfo(name=name, error=to_wire(error))
        else:
            yield _topic(image, found)
    for topic_id in dict.fromkeys(request.topic_ids):
        found = image.topics.get(topic_id)
        if found is None:
            missing = UnknownTopicId(f"there is no topic with the id {topic_id[:16].hex()}; it may have been deleted")
            yield metadata_pb2.TopicInfo(topic_id=topic_id, error=to_wire(missing))
        elif describes is not None and not describes.allow(found.name):
            hidden = TopicAuthorizationFailed(f"{who.principal} may not DESCRIBE the topic with id {topic_id.hex()}")
            yield metadata_pb2.TopicInfo(topic_id=topic_id, error=to_wire(hidden))
        else:
            yield _topic(image, found)


def _topic(image: MetadataImage, topic: TopicImage) -> metadata_pb2.TopicInfo:
    up = frozenset(broker_id for broker_id, broker in image.brokers.items() if not broker.fenced)
    return metadata_pb2.TopicInfo(
        name=topic.name,
        topic_id=topic.topic_id,
        internal=topic.internal,
        partitions=[
            metadata_pb2.PartitionInfo(
                partition=partition.partition,
                leader=partition.leader,
                leader_epoch=partition.leader_epoch,
                partition_epoch=partition.partition_epoch,
                replicas=partition.replicas,
                isr=partition.isr,
                eligible_leader_replicas=partition.eligible_leader_replicas,
                adding_replicas=partition.adding_replicas,
                removing_replicas=partition.removing_replicas,
                offline_replicas=_offline(image, partition, up),
                lost_replicas=[each for each, _ in partition.lost_replicas if image.is_lost(partition, each)],
            )
            for partition in topic.partitions
        ],
    )


def _offline(image: MetadataImage, partition: PartitionImage, up: frozenset[int]) -> Sequence[int]:
    """Return the replicas whose broker is fenced or gone, or has no working log for the partition."""
    if not partition.offline_replicas and up.issuperset(partition.replicas):
        return ()
    return [each for each in partition.replicas if each not in up or image.is_offline(partition, each)]
