"""Decisions on brokers. They change the broker's record only.

    (unknown) --register--> fenced --unfence--> active --begin shutdown--> shutting down
                              ^                    |                            |
                              +--fence, register---+----------------------------+

What a broker's state means for its partitions comes with the `ElectLeaders(SETTLE)` commands that the controller
proposes for `raftmeta.elections.unsettled`, in pieces, so that no entry of the log grows with the cluster. A broker is
unfenced only after them.

Beside these states a broker is cordoned or drained on request of an operator (`alter_broker`), until the operator
ends it, and its storage is full while the broker reports that.

Decisions that concern the cluster as a whole: its controller, its features, its producer ids.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from raftlog._core.words import some
from raftlog.config import MAX_INT64
from raftlog.errors import (
    BrokerIdNotRegistered,
    DuplicateBrokerRegistration,
    FeatureUpdateFailed,
    FencedController,
    InconsistentClusterId,
    InvalidRequestError,
    StaleBrokerEpoch,
    UnsupportedVersion,
)
from raftlog.v1 import records_pb2
from raftlog.v1.records_pb2 import MetadataRecord
from raftmeta.decide.outcome import MAX_NAME_SHOWN, Accepted, CommandResult
from raftmeta.elections import has_unsettled
from raftmeta.features import (
    BASELINE,
    DRAIN_LEVEL,
    DRAINING,
    FULL_STORAGE,
    FULL_STORAGE_LEVEL,
    KAFKA_LISTENER_LEVEL,
    PRODUCER_OWNERS_LEVEL,
    REPLACED_DISK_LEVEL,
    SYNCED_LEVEL,
    check_metadata_version,
    metadata_version,
    supports,
)
from raftmeta.image import (
    NO_LOAD,
    BrokerImage,
    FeatureSupport,
    MetadataImage,
    broker_record,
    feature_record,
    producer_id_key_record,
    producer_ids_record,
    remove_broker_record,
)
from raftmeta.producer_ids import MAX_NUMBER, SECRET_BYTES, ProducerIdKey

_UUID_BYTES = 16
MAX_PORT = 65535
MAX_BROKERS: Final = 10_000
MAX_CHARACTERS: Final = 255
"""Of a host, a rack, a feature's name."""
MAX_FEATURES: Final = 64
MAX_DIRECTORIES: Final = 256
MAX_UNSYNCED_TOPICS: Final = 10_000
_MAX_LISTED: Final = 20


def register_broker(image: MetadataImage, command: records_pb2.RegisterBrokerCommand, offset: int) -> Accepted:
    """Register a process as a broker: fenced, with its registration's offset as its epoch.

    The same process (incarnation) may do so again and again, and keeps epoch and state.
    """
    features = _check_registration(image, command)
    known = image.brokers.get(command.broker_id)
    again = known is not None and known.incarnation_id == command.incarnation_id
    if known is not None and not again:
        _check_predecessor(known, command)
    drained = known is not None and known.drained and (again or not known.drained_until_restart)
    knows_directories = metadata_version(image) >= REPLACED_DISK_LEVEL
    if known is not None and again:
        unclean, unsynced = known.unclean, known.unsynced_topic_ids
    else:
        unclean, unsynced = _may_lack(known, command, counts_syncs=metadata_version(image) >= SYNCED_LEVEL)
    knows_kafka = metadata_version(image) >= KAFKA_LISTENER_LEVEL
    broker = BrokerImage(
        broker_id=command.broker_id,
        incarnation_id=command.incarnation_id,
        broker_epoch=known.broker_epoch if known is not None and again else offset,
        host=command.host,
        port=command.port,
        rack=command.rack,
        fenced=known.fenced if known is not None and again else True,
        in_controlled_shutdown=known.in_controlled_shutdown if known is not None and again else False,
        unclean=unclean,
        directory_id=command.directory_id,
        lock_identity=command.lock_identity,
        inter_node_host=command.inter_node_host,
        inter_node_port=command.inter_node_port,
        features=features,
        cordoned=known is not None and known.cordoned,
        drained=drained,
        drained_until_restart=drained and known is not None and known.drained_until_restart,
        other_directory_ids=tuple(sorted({*command.other_directory_ids})) if knows_directories else (),
        former_directory_ids=_former_directories(known, command) if knows_directories else (),
        unsynced_topic_ids=unsynced,
        storage_full=known is not None and again and known.storage_full,
        kafka_host=command.kafka_host if knows_kafka else "",
        kafka_port=command.kafka_port if knows_kafka else 0,
    )
    if broker == known:
        return (), CommandResult(image.offset, broker_epoch=broker.broker_epoch)
    return (broker_record(broker),), CommandResult(offset, broker_epoch=broker.broker_epoch)


def _check_registration(image: MetadataImage, command: records_pb2.RegisterBrokerCommand) -> tuple[FeatureSupport, ...]:
    if command.broker_id < 0:
        raise InvalidRequestError(f"broker id {command.broker_id} is negative")
    if len(command.incarnation_id) != _UUID_BYTES:
        raise InvalidRequestError(f"an incarnation id has 16 bytes, this one has {len(command.incarnation_id)}")
    if len(command.other_directory_ids) > MAX_DIRECTORIES:
        raise InvalidRequestError(
            f"broker {command.broker_id} names {len(command.other_directory_ids)} directories besides its first one, "
            f"it may name {MAX_DIRECTORIES}"
        )
    if len(command.unsynced_topic_ids) > MAX_UNSYNCED_TOPICS:
        raise InvalidRequestError(
            f"broker {command.broker_id} names {len(command.unsynced_topic_ids)} topics with records that were not "
            f"fsynced, it may name {MAX_UNSYNCED_TOPICS}"
        )
    for what, given in (
        ("directory id", command.directory_id),
        ("lock identity", command.lock_identity),
        *(("directory id", each or b"-") for each in command.other_directory_ids),
        *(("topic id", each or b"-") for each in command.unsynced_topic_ids[: MAX_UNSYNCED_TOPICS + 1]),
    ):
        if len(given) not in (0, _UUID_BYTES):
            raise InvalidRequestError(f"a {what} has 16 bytes, this one has {len(given)}")
    for what, text in (
        ("host", command.host),
        ("inter-node host", command.inter_node_host),
        ("host for Kafka clients", command.kafka_host),
        ("rack", command.rack),
        *(("feature's name", each.name) for each in command.features[: MAX_FEATURES + 1]),
    ):
        if len(text) > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"broker {command.broker_id}: a {what} has up to {MAX_CHARACTERS} characters, this one {len(text)}"
            )
    if len(command.features) > MAX_FEATURES:
        raise InvalidRequestError(
            f"broker {command.broker_id} names {len(command.features)} features, it may name {MAX_FEATURES}"
        )
    if command.broker_id not in image.brokers and len(image.brokers) >= MAX_BROKERS:
        raise InvalidRequestError(f"{MAX_BROKERS} brokers are registered already; unregister those that are gone")
    if not command.host or not 1 <= command.port <= MAX_PORT:
        raise InvalidRequestError(f"broker {command.broker_id}: {command.host!r}:{command.port} is no address")
    if not 0 <= command.inter_node_port <= MAX_PORT or bool(command.inter_node_host) != bool(command.inter_node_port):
        raise InvalidRequestError(
            f"broker {command.broker_id}: {command.inter_node_host!r}:{command.inter_node_port} "
            "is no address between nodes"
        )
    if not 0 <= command.kafka_port <= MAX_PORT or bool(command.kafka_host) != bool(command.kafka_port):
        raise InvalidRequestError(
            f"broker {command.broker_id}: {command.kafka_host!r}:{command.kafka_port} is no address for Kafka clients"
        )
    features = tuple(sorted(FeatureSupport(each.name, each.min_level, each.max_level) for each in command.features))
    for name, level in sorted({**BASELINE, **image.features}.items()):
        if not supports(features, name, level):
            raise UnsupportedVersion(
                f"broker {command.broker_id} does not know {name} at level {level}, which the cluster uses; "
                "run a version on it that does"
            )
    return features


def _check_predecessor(known: BrokerImage, command: records_pb2.RegisterBrokerCommand) -> None:
    same_lock = bool(command.lock_identity) and command.lock_identity == known.lock_identity
    if not known.fenced and not same_lock:
        raise DuplicateBrokerRegistration(
            f"broker {known.broker_id} is running already, at {known.host}:{known.port}; give this one another "
            "node.id, or wait for the session of the other one to end if that has died"
        )


def _may_lack(
    known: BrokerImage | None, command: records_pb2.RegisterBrokerCommand, *, counts_syncs: bool
) -> tuple[bool, tuple[bytes, ...]]:
    """Return whether the new process may lack acknowledged records of any topic; if not, the topics where it may.

    A mark counts only if it has the registered broker epoch (another epoch: the mark is from an earlier process) and
    the same directory. A clean-shutdown mark covers all records. `synced_broker_epoch` covers the records that were
    fsynced before they were acknowledged: those of all topics except `unsynced_topic_ids` (docs/adr/0024).

    A topic or broker that may lack records stays so until the broker has been unfenced: a clean stop in between does
    not bring anything back.
    """
    if known is None:
        return False, ()
    same_directory = command.directory_id == known.directory_id
    clean = command.HasField("previous_broker_epoch") and command.previous_broker_epoch == known.broker_epoch
    synced = (
        counts_syncs and command.HasField("synced_broker_epoch") and command.synced_broker_epoch == known.broker_epoch
    )
    if known.unclean or not same_directory or not (clean or synced):
        return True, ()
    lacking = set(known.unsynced_topic_ids)
    if not clean:
        lacking.update(command.unsynced_topic_ids)
    return False, tuple(sorted(lacking))


def _former_directories(known: BrokerImage | None, command: records_pb2.RegisterBrokerCommand) -> tuple[bytes, ...]:
    """Return the log directories that the broker had, if it comes back without any of them; else none.

    If one of several is still there, some of its logs are, and only the broker knows which. Until the broker has been
    unfenced, "had" means when it was last unfenced; the state ends when all of those directories are back.
    """
    if known is None:
        return ()
    present = {command.directory_id, *command.other_directory_ids}
    if known.former_directory_ids:
        return () if present.issuperset(known.former_directory_ids) else known.former_directory_ids
    return known.directory_ids if present.isdisjoint(known.directory_ids) else ()


def find_broker(image: MetadataImage, broker_id: int, broker_epoch: int) -> BrokerImage:
    """Return a registered broker.

    Raises:
        BrokerIdNotRegistered: it is not.
        StaleBrokerEpoch: it is, with another epoch: another process has registered since.
    """
    broker = image.brokers.get(broker_id)
    if broker is None:
        raise BrokerIdNotRegistered(f"broker {broker_id} is not registered; register first")
    if broker.broker_epoch != broker_epoch:
        raise StaleBrokerEpoch(
            f"broker epoch {broker_epoch} of broker {broker_id} is not the present one, {broker.broker_epoch}; "
            "register again"
        )
    return broker


def _changed(image: MetadataImage, before: BrokerImage, after: BrokerImage, offset: int) -> Accepted:
    if after == before:
        return (), CommandResult(image.offset, broker_epoch=before.broker_epoch)
    return (broker_record(after),), CommandResult(offset, broker_epoch=after.broker_epoch)


def fence_broker(image: MetadataImage, command: records_pb2.FenceBrokerCommand, offset: int) -> Accepted:
    """Fence a broker: its heartbeats are missing, and its lease has expired."""
    broker = find_broker(image, command.broker_id, command.broker_epoch)
    return _changed(image, broker, replace(broker, fenced=True), offset)


def unfence_broker(image: MetadataImage, command: records_pb2.UnfenceBrokerCommand, offset: int) -> Accepted:
    """Unfence a broker. Its partitions must have been settled while it was fenced."""
    broker = find_broker(image, command.broker_id, command.broker_epoch)
    leaderships = image.load.get(broker.broker_id, NO_LOAD).leaderships
    if broker.fenced and leaderships:
        # Unfenced now it would lead on in the old leader epoch, although its process may be another one.
        raise InvalidRequestError(
            f"broker {broker.broker_id} is still the leader of {leaderships} partitions from before it was fenced; "
            "settle those first"
        )
    if (broker.unclean or broker.unsynced_topic_ids) and has_unsettled(image, broker.broker_id):
        raise InvalidRequestError(
            f"broker {broker.broker_id} is back from an unclean stop and still counts as in sync with others; "
            "settle its partitions first"
        )
    unfenced = replace(broker, fenced=False, unclean=False, former_directory_ids=(), unsynced_topic_ids=())
    return _changed(image, broker, unfenced, offset)


def begin_shutdown(image: MetadataImage, command: records_pb2.BeginShutdownCommand, offset: int) -> Accepted:
    """Mark a broker as about to stop: it gets no new replicas, and other brokers take over its leaderships."""
    broker = find_broker(image, command.broker_id, command.broker_epoch)
    return _changed(image, broker, replace(broker, in_controlled_shutdown=True), offset)


def alter_broker(image: MetadataImage, command: records_pb2.AlterBrokerCommand, offset: int) -> Accepted:
    """Cordon, uncordon, drain or undrain a broker, in any state; or note that its disk is full, or no longer.

    This moves nothing by itself: the controller settles the broker's partitions afterwards.
    """
    if command.HasField("storage_full"):
        check_metadata_version(image, FULL_STORAGE_LEVEL, FULL_STORAGE)
        broker = find_broker(image, command.broker_id, command.broker_epoch)
        return _changed(image, broker, replace(broker, storage_full=command.storage_full), offset)
    check_metadata_version(image, DRAIN_LEVEL, DRAINING)
    known = image.brokers.get(command.broker_id)
    if known is None:
        raise BrokerIdNotRegistered(
            f"broker {command.broker_id} is not registered; the cluster has "
            f"{some(sorted(image.brokers), _MAX_LISTED) or 'none'}"
        )
    if not command.HasField("cordoned") and not command.HasField("drained"):
        raise InvalidRequestError(f"broker {known.broker_id}: say whether it is to be cordoned, or drained")
    if command.until_restart and not command.drained:
        raise InvalidRequestError(f"broker {known.broker_id}: only draining can last until a restart")
    cordoned = command.cordoned if command.HasField("cordoned") else known.cordoned
    drained = command.drained if command.HasField("drained") else known.drained
    until_restart = command.until_restart if command.HasField("drained") else known.drained_until_restart
    if drained and command.HasField("cordoned") and not cordoned:
        raise InvalidRequestError(
            f"broker {known.broker_id} is drained, and gets no new replicas as long as it is; undrain it first "
            f"(raftlog broker undrain {known.broker_id})"
        )
    after = replace(known, cordoned=cordoned, drained=drained, drained_until_restart=until_restart)
    return _changed(image, known, after, offset)


def unregister_broker(image: MetadataImage, command: records_pb2.UnregisterBrokerCommand, offset: int) -> Accepted:
    """Forget a broker that is gone for good."""
    broker = image.brokers.get(command.broker_id)
    if broker is None:
        raise BrokerIdNotRegistered(f"broker {command.broker_id} is not registered")
    if not broker.fenced:
        raise InvalidRequestError(f"broker {broker.broker_id} is running; stop it first")
    replicas = image.load.get(broker.broker_id, NO_LOAD).replicas
    if replicas:
        raise InvalidRequestError(
            f"broker {broker.broker_id} still holds replicas of {replicas} partitions; "
            "bring it back, move them with a reassignment, or delete their topics, first"
        )
    return (remove_broker_record(broker.broker_id),), CommandResult(offset)


PRODUCER_IDS_PER_BLOCK = 1000


def claim_controller(
    image: MetadataImage, command: records_pb2.ClaimControllerCommand, controller_epoch: int, offset: int
) -> Accepted:
    """Make a controller the active one, with an epoch above all earlier ones.

    The first claim names the cluster, and says at which levels its features begin.
    """
    if controller_epoch <= image.controller_epoch:
        raise FencedController(
            f"controller epoch {controller_epoch} cannot be claimed, "
            f"controller {image.controller_id} already has {image.controller_epoch}"
        )
    records = []
    if not image.cluster_id:
        if not command.cluster_id:
            raise InvalidRequestError("the first claim names the cluster: cluster_id is empty")
        records.append(MetadataRecord(cluster=records_pb2.ClusterRecord(cluster_id=command.cluster_id)))
        records += [
            feature_record(each.name, each.level)
            for each in command.features
            if each.level > BASELINE.get(each.name, 0)
        ]
    elif command.cluster_id not in ("", image.cluster_id):
        raise InconsistentClusterId(
            f"cluster.id={command.cluster_id!r}, but this metadata belongs to the cluster {image.cluster_id!r}; "
            "correct cluster.id or metadata.log.dir"
        )
    records.append(
        MetadataRecord(
            controller=records_pb2.ControllerRecord(
                controller_id=command.controller_id, controller_epoch=controller_epoch
            )
        )
    )
    return tuple(records), CommandResult(offset)


def update_feature(image: MetadataImage, command: records_pb2.UpdateFeatureCommand, offset: int) -> Accepted:
    """Finalize a feature at a higher level, once every registered broker knows that level (KIP-584)."""
    name = command.name[:MAX_NAME_SHOWN]
    level = image.features.get(command.name, BASELINE.get(command.name, 0))
    if command.level < level or command.level < 0:
        raise FeatureUpdateFailed(
            f"{name} is at level {level} and cannot be lowered to {command.level}: "
            "what was committed at that level may need it"
        )
    if command.level == level:
        return (), CommandResult(image.offset)
    if not image.brokers:
        raise FeatureUpdateFailed(f"no broker is registered, so none supports {name}; start the brokers first")
    for broker_id in sorted(image.brokers):
        if not supports(image.brokers[broker_id].features, command.name, command.level):
            raise FeatureUpdateFailed(
                f"broker {broker_id} does not know {name} at level {command.level}; "
                "run a newer version there first, or unregister it if it is gone for good"
            )
    if command.validate_only:
        return (), CommandResult(image.offset)
    return (feature_record(command.name, command.level),), CommandResult(offset)


def allocate_producer_ids(
    image: MetadataImage, command: records_pb2.AllocateProducerIdsCommand, offset: int
) -> Accepted:
    """Give a broker a block of numbers for producer ids that no other broker ever gets (KIP-730).

    The first one from metadata.version 5 on makes the secret, by which ids are bound to their owners, the cluster's.
    """
    find_broker(image, command.broker_id, command.broker_epoch)
    first = image.next_producer_id
    records: list[MetadataRecord] = []
    is_bound = image.producer_id_key is not None
    if not is_bound and metadata_version(image) >= PRODUCER_OWNERS_LEVEL:
        if len(command.new_secret) != SECRET_BYTES:
            raise InvalidRequestError(
                f"the cluster needs a secret for its producer ids: {SECRET_BYTES} random bytes, not "
                f"{len(command.new_secret)}"
            )
        records.append(producer_id_key_record(ProducerIdKey(command.new_secret, first)))
        is_bound = True
    if first > (MAX_NUMBER if is_bound else MAX_INT64) - PRODUCER_IDS_PER_BLOCK:
        raise InvalidRequestError("all producer ids are used up")
    records.append(producer_ids_record(first + PRODUCER_IDS_PER_BLOCK))
    result = CommandResult(offset, first_producer_id=first, producer_ids=PRODUCER_IDS_PER_BLOCK)
    return tuple(records), result
