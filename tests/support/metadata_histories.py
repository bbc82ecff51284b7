"""Random lives of a cluster: commands sensible and senseless, current and late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from hypothesis import strategies as st

from raftlog._core.security.acls import Acl, Role
from raftlog.v1.records_pb2 import ConfigResource, ElectLeadersCommand, MetadataCommand, PartitionRef
from raftlog.v1.security_pb2 import SCRAM_SHA_256, SCRAM_SHA_512, UNKNOWN_MECHANISM, RoleAlteration, ScramCredential
from raftlog.v1.security_pb2 import Acl as WireAcl
from raftmeta.credentials import Mechanism
from raftmeta.decide import Decision, decide
from raftmeta.elections import unsettled
from raftmeta.features import SUPPORTED
from raftmeta.image import MetadataImage
from raftmeta.quotas import QuotaEntity
from raftmeta.replay import replay_all
from tests.support import metadata as make
from tests.support import metadata_security as security

Step = Callable[[MetadataImage], MetadataCommand]
"""Makes a command from what its proposer has seen of the cluster."""

BROKERS = (1, 2, 3, 4)


@dataclass(frozen=True, slots=True)
class Event:
    """One command of a life: the image before it, the decision, and the image after it."""

    before: MetadataImage
    command: MetadataCommand
    offset: int
    decision: Decision
    after: MetadataImage


def live(steps: list[tuple[Step, int, int]]) -> Iterator[Event]:
    """Play steps of (command, how many images behind its proposer is, how many offsets the log skips before it)."""
    image = MetadataImage()
    seen = [image]
    offset = 0
    for step, behind, gap in steps:
        offset += 1 + gap
        proposer = seen[max(0, len(seen) - 1 - behind)]
        command = step(proposer)
        if command.controller_epoch == make.EPOCH and command.WhichOneof("command") != "claim_controller":
            command.controller_epoch = proposer.controller_epoch
        decision = decide(image, command, offset)
        after = replay_all(image, decision.records, offset) if decision.records else image
        yield Event(image, command, offset, decision, after)
        image = after
        seen.append(image)


_names = st.sampled_from(["a", "b", "a.b", "a_b", "__internal", "..", "", "x" * 250, "ü"])
_keys = st.sampled_from(["retention.ms", "retention_ms", "segment.bytes", "log.retention.ms", "nonsense"])
_values = st.sampled_from(["1000", "2000", "64KiB", "7d", "-1", "soon"])
_configs = st.one_of(
    st.dictionaries(_keys, _values, max_size=2),
    st.sampled_from(
        [{"min.insync.replicas": "2"}, {"min.insync.replicas": "3"}, {"unclean.leader.election.enable": "true"}]
    ),
)
_resources = st.sampled_from(["a", "b", "", "1", "2", "9"])
_brokers = st.sampled_from(BROKERS)
_topics = st.sampled_from([1, 1, 1, 2])
_partitions = st.sampled_from([0, 0, 0, 0, 1, 2])


def _always(commands: st.SearchStrategy[MetadataCommand]) -> st.SearchStrategy[Step]:
    def constant(command: MetadataCommand) -> Step:
        return lambda _: command

    return commands.map(constant)


def _by_broker(command: Callable[[int, int], MetadataCommand]) -> st.SearchStrategy[Step]:
    def of(broker_id: int) -> Step:
        return lambda image: command(broker_id, make.broker_epoch(image, broker_id))

    return _brokers.map(of)


def _restart(broker_id: int, clean: bool, same_directory: bool, synced: bool, unsynced_topics: list[int]) -> Step:
    def command(image: MetadataImage) -> MetadataCommand:
        known = make.broker_epoch(image, broker_id)
        return make.register(
            broker_id,
            incarnation=4 * (image.offset + 10)
            + 2 * clean
            + same_directory,  # a process has one directory all its life
            directory=None if same_directory else image.offset + 2000,
            previous_epoch=known if clean and known >= 0 else None,
            synced_epoch=known if synced and known >= 0 else None,
            unsynced_topics=unsynced_topics,
        )

    return command


def _alter_partition(topic: int, partition: int, members: list[int]) -> Step:
    """The ISR that a leader would request: itself, and some of the replicas (by their positions)."""

    def command(image: MetadataImage) -> MetadataCommand:
        known = image.partition(make.uuid_of(topic), partition)
        if known is None:
            return make.elect(make.refs((topic, partition)))
        others = [replica for place, replica in enumerate(known.replicas) if place in members]
        return make.alter_partition(image, [known.leader, *(r for r in others if r != known.leader)], topic, partition)

    return command


def _offline_replicas(broker_id: int, topic: int, partition: int) -> Step:
    return lambda image: make.offline_replicas(image, broker_id, make.refs((topic, partition)))


def _settle(image: MetadataImage) -> MetadataCommand:
    return make.elect(list(islice(unsettled(image), 500)))


def _hand_over(image: MetadataImage) -> MetadataCommand:
    revoked = [
        PartitionRef(topic_id=topic_id, partition=partition.partition)
        for topic_id in sorted(image.topics)
        for partition in image.topics[topic_id].partitions
        if partition.revoked_leader is not None
    ]
    return make.elect(revoked, handed_over=True)


_create = _always(
    st.builds(make.create_topic, _names, _topics, st.integers(-1, 4), st.integers(0, 4), _configs, st.booleans())
)
_sensible_create = _always(
    st.builds(
        make.create_topic,
        st.sampled_from(["a", "b"]),
        _topics,
        st.integers(1, 3),
        st.integers(1, 3),
        st.sampled_from([{}, {"min.insync.replicas": "2"}, {"unclean.leader.election.enable": "true"}]),
    )
)
_types = st.sampled_from([ElectLeadersCommand.SETTLE, ElectLeadersCommand.PREFERRED, ElectLeadersCommand.UNCLEAN])
_refs = st.lists(st.builds(lambda t, p: (t, p), _topics, _partitions), max_size=3).map(lambda r: make.refs(*r))

_alter = st.builds(
    _alter_partition, _topics, _partitions, st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True)
)
_reassign = st.builds(
    lambda partition, replicas: lambda _: make.reassign("a", partition, replicas),
    _partitions,
    st.lists(_brokers, max_size=3, unique=True),
)
_alter_broker = _always(
    st.builds(
        make.alter_broker,
        _brokers,
        st.sampled_from([None, None, True, False]),
        st.sampled_from([None, True, True, False, False]),
        st.booleans(),
    )
)
_storage_full = st.builds(
    lambda broker_id, full: lambda image: make.storage_full(broker_id, make.broker_epoch(image, broker_id), full),
    _brokers,
    st.booleans(),
)
_offline = st.builds(_offline_replicas, _brokers, _topics, _partitions)
_restarted = st.builds(
    _restart,
    _brokers,
    st.booleans(),
    st.sampled_from([True, True, True, False]),
    st.booleans(),
    st.sampled_from([[], [], [1], [2], [1, 2]]),
)

_users = st.sampled_from(["alice", "bob", "bob", "", "*", "ü,="])
_mechanisms = st.sampled_from([SCRAM_SHA_256, SCRAM_SHA_512, SCRAM_SHA_512, UNKNOWN_MECHANISM])


def _forget_a_user(image: MetadataImage) -> MetadataCommand:
    """One that is there, with all credentials, in favour of another one."""
    return security.alter_users(
        [security.credential("carol")],
        [security.deletion(key.user, UNKNOWN_MECHANISM) for key in sorted(image.credentials)[:1]],
    )


def _set_again(image: MetadataImage) -> MetadataCommand:
    return security.alter_users([image.credentials[key].to_wire() for key in sorted(image.credentials)])


def _replace_acls(added: list[Acl]) -> Step:
    """In place of some that are there."""
    return lambda image: security.alter_acls(added, sorted(image.acls - set(added))[:3])


def _alter_role(
    name: str, action: RoleAlteration.Action.ValueType, added: list[Acl], grant: list[str], revoke: list[str]
) -> Step:
    """Some of its permissions go as well; a role that is there is created again, or deleted, now and then."""

    def command(image: MetadataImage) -> MetadataCommand:
        known = image.roles.get(name, Role(name))
        removed = sorted(known.permissions)[:2] if action == RoleAlteration.CHANGE else []
        if action == RoleAlteration.DELETE:
            return security.alter_roles(security.role(name, action))
        return security.alter_roles(security.role(name, action, add=added, remove=removed, grant=grant, revoke=revoke))

    return command


def _credentials(user: str, mechanism: Mechanism, secret: int, iterations: int) -> list[ScramCredential]:
    return [security.credential(user, mechanism, secret, iterations)]


_alter_users = _always(
    st.builds(
        security.alter_users,
        st.builds(_credentials, _users, _mechanisms, st.integers(1, 3), st.sampled_from([8192, 8192, 4096, 1])),
        st.lists(st.builds(security.deletion, _users, _mechanisms), max_size=1),
    )
)
acls: st.SearchStrategy[Acl] = st.builds(
    security.acl,
    st.sampled_from(["a", "a.", "a.b", "b", "*", "raftlog-cluster"]),
    st.sampled_from([WireAcl.READ, WireAcl.DESCRIBE, WireAcl.ALL, WireAcl.ALTER, WireAcl.ANY_OPERATION]),
    st.sampled_from(["User:alice", "User:bob", "User:*", "alice"]),
    host=st.sampled_from(["*", "*", "10.0.0.1", "::FFFF:10.0.0.1", "here"]),
    resource_type=st.sampled_from([WireAcl.TOPIC, WireAcl.TOPIC, WireAcl.GROUP, WireAcl.CLUSTER]),
    pattern_type=st.sampled_from([WireAcl.LITERAL, WireAcl.LITERAL, WireAcl.PREFIXED, WireAcl.MATCH]),
    permission=st.sampled_from([WireAcl.ALLOW, WireAcl.ALLOW, WireAcl.DENY, WireAcl.UNKNOWN_PERMISSION]),
)
"""Sensible ones, and others that no cluster takes."""
_quotas: st.SearchStrategy[security.Alteration] = st.tuples(
    st.builds(
        QuotaEntity,
        st.sampled_from([None, "", "alice"]),
        st.sampled_from([None, "", "app"]),
        st.sampled_from([None, None, None, "10.0.0.1"]),
    ),
    st.sampled_from(["producer_byte_rate", "consumer_byte_rate", "connection_creation_rate", "speed"]),
    st.sampled_from([None, 1.0, 2.0, 2.0, 0.0]),
)
_sensible_acls = st.lists(
    st.builds(
        security.acl,
        st.sampled_from(["a", "b"]),
        st.sampled_from([WireAcl.READ, WireAcl.WRITE]),
        pattern_type=st.sampled_from([WireAcl.LITERAL, WireAcl.PREFIXED]),
        permission=st.sampled_from([WireAcl.ALLOW, WireAcl.DENY]),
    ),
    max_size=3,
)

_principals = st.lists(st.sampled_from(["User:alice", "User:bob", "User:*", "alice"]), max_size=2)
_alter_roles: st.SearchStrategy[Step] = st.builds(
    _alter_role,
    st.sampled_from(["clerk", "auditor", ""]),
    st.sampled_from([RoleAlteration.CREATE, RoleAlteration.CHANGE, RoleAlteration.CHANGE, RoleAlteration.DELETE]),
    _sensible_acls,
    _principals,
    _principals,
)

_what_clusters_do: list[st.SearchStrategy[Step]] = [
    *[st.just(_settle)] * 6,
    *[_by_broker(make.unfence)] * 5,
    *[_by_broker(make.fence)] * 4,
    *[_alter] * 5,
    *[_restarted] * 3,
    *[_reassign] * 2,
    *[_offline] * 2,
    *[_alter_broker] * 3,
    *[_storage_full] * 2,
    *[st.just(_hand_over)] * 2,
    _by_broker(make.begin_shutdown),
    _sensible_create,
    _always(st.builds(make.alter, st.just("a"), _configs)),
]
_who_may_what: list[st.SearchStrategy[Step]] = [
    *[_alter_users] * 4,
    *[_sensible_acls.map(_replace_acls)] * 3,
    *[_always(st.builds(security.alter_quotas, _quotas, _quotas))] * 2,
    *[_always(st.builds(security.alter_quotas, _quotas))] * 2,
    *[_alter_roles] * 4,
    st.just(_forget_a_user),
    st.just(_set_again),
    _always(st.builds(security.alter_acls, st.lists(acls, max_size=2), st.lists(acls, max_size=2))),
]
_anything: list[st.SearchStrategy[Step]] = [
    _by_broker(make.allocate_producer_ids),
    _always(_brokers.map(make.unregister)),
    _always(st.builds(make.register, st.integers(-1, 4), st.integers(1, 3), st.sampled_from([9092, 9093, 0]))),
    _create,
    _always(st.builds(make.elect, _refs, _types, st.booleans())),
    _always(st.builds(make.revoke, _refs)),
    _by_broker(make.allocate_producer_ids),
    _always(_brokers.map(make.unregister)),
    _always(st.builds(make.register, st.integers(-1, 4), st.integers(1, 3), st.sampled_from([9092, 9093, 0]))),
    _create,
    _always(st.builds(make.delete_topic, _names, st.sampled_from([b"", make.uuid_of(1), b"short"]))),
    _always(st.builds(make.create_partitions, _names, st.integers(-1, 6))),
    _always(
        st.builds(
            make.alter,
            _resources,
            _configs,
            st.lists(_keys, max_size=2),
            st.sampled_from([ConfigResource.TOPIC, ConfigResource.BROKER]),
            st.booleans(),
            st.sampled_from([1, 1, 1, 1, 2, 0]),
        )
    ),
    _always(st.builds(make.claim, st.sampled_from([1, 2]), st.just(1), st.sampled_from(["test", "", "other"]))),
    _always(st.builds(make.update_feature, st.sampled_from(["metadata.version", "x"]), st.integers(-1, 4))),
    st.one_of(*_who_may_what),
    st.one_of(*_who_may_what),
    st.just(lambda _: MetadataCommand(controller_epoch=1)),
]
steps: st.SearchStrategy[Step] = st.one_of(*_what_clusters_do, *_what_clusters_do, *_anything)

_behind = st.sampled_from([0, 0, 0, 0, 0, 1, 3])
_gaps = st.sampled_from([0, 0, 0, 1, 7])


def _begin(*, at_newest_level: bool = False) -> list[tuple[Step, int, int]]:
    begin: list[Step] = [lambda _: make.claim(levels=make.levels_with_ids_asked_for())]
    for broker_id in BROKERS[:3]:
        begin.append(lambda _, b=broker_id: make.register(b))  # type: ignore[misc] # mypy does not infer the default
        begin.append(lambda image, b=broker_id: make.unfence(b, make.broker_epoch(image, b)))  # type: ignore[misc]
    begin.append(lambda _: make.create_topic("a", 1, 2, 3, {"min.insync.replicas": "2"}, user="User:a"))
    if at_newest_level:
        begin.append(lambda _: make.update_feature("metadata.version", SUPPORTED["metadata.version"].max_level))
    return [(step, 0, 0) for step in begin]


lives = st.builds(
    lambda at_newest_level, drawn: [*_begin(at_newest_level=at_newest_level), *drawn],
    st.booleans(),
    st.lists(st.tuples(steps, _behind, _gaps), min_size=1, max_size=60),
)
"""Lives that begin with three brokers that are up and a topic of two partitions, three replicas each."""

_restarted_or_so: list[st.SearchStrategy[Step]] = [_restarted, _always(_names.map(make.delete_topic)), _sensible_create]
_unready: list[tuple[Step, int, int]] = [(lambda _: make.claim(), 0, 0)]
security_lives = st.tuples(
    st.sampled_from([_begin(at_newest_level=True), _begin(at_newest_level=True), _begin(), _unready]),
    st.lists(st.tuples(st.one_of(*_who_may_what, *_restarted_or_so), _behind, _gaps), min_size=10, max_size=40),
).map(lambda drawn: [*drawn[0], *drawn[1]])
"""As `lives`, with more about users and permissions; some in clusters that are not ready for these."""

_flags = st.sampled_from([(None, True), (None, True), (True, None), (True, True)])
_makers: list[st.SearchStrategy[Step]] = [
    _always(st.builds(make.create_topic, st.just("b"), st.just(2), st.integers(1, 2), st.integers(1, 2))),
    _always(st.builds(make.create_partitions, st.sampled_from(["a", "b"]), st.integers(2, 5))),
    _reassign,
]


def _begin_flagged(flagged: dict[int, tuple[bool | None, bool | None]]) -> list[tuple[Step, int, int]]:
    commands = [make.alter_broker(broker_id, *flags) for broker_id, flags in sorted(flagged.items())]
    return [*_begin(), *((lambda _, c=command: c, 0, 0) for command in commands)]


flagged_lives = st.tuples(
    st.dictionaries(st.sampled_from(BROKERS[:3]), _flags, min_size=1, max_size=2),
    st.lists(st.tuples(st.one_of(*_what_clusters_do, *_makers), _behind, _gaps), min_size=10, max_size=60),
).map(lambda drawn: [*_begin_flagged(drawn[0]), *drawn[1]])
"""As `lives`, with one or two brokers cordoned or drained before anything else happens, and more that is placed."""


_DISKS = 3


def _start_on(broker_id: int, disk: int, clean: bool) -> Step:
    """Another process of a broker starts, on one of the disks that it has had."""

    def command(image: MetadataImage) -> MetadataCommand:
        known = image.brokers.get(broker_id)
        directory = 1_000 * disk + broker_id
        same = known is not None and known.directory_id == make.uuid_of(directory)
        previous = known.broker_epoch if clean and same and known is not None else None
        incarnation = 2 * (_DISKS + 1) * (image.offset + 10) + 2 * disk + clean
        return make.register(broker_id, incarnation=incarnation, directory=directory, previous_epoch=previous)

    return command


_elect_uncleanly = _always(st.just(make.elect(make.refs((1, 0), (1, 1)), ElectLeadersCommand.UNCLEAN)))
_disk_steps: list[st.SearchStrategy[Step]] = [
    *[st.just(_settle)] * 6,
    *[_by_broker(make.unfence)] * 5,
    *[_by_broker(make.fence)] * 4,
    *[_alter] * 4,
    *[st.builds(_start_on, _brokers, st.integers(1, _DISKS), st.booleans())] * 5,
    st.just(_hand_over),
    _elect_uncleanly,
    _offline,
    _reassign,
]


def _begin_on_disks(minimum: int) -> list[tuple[Step, int, int]]:
    configs = {"min.insync.replicas": str(minimum)}
    return [*_begin()[:-1], (lambda _: make.create_topic("a", 1, 2, 2, configs), 0, 0)]


disk_lives = st.tuples(
    st.integers(1, 2), st.lists(st.tuples(st.one_of(*_disk_steps), _behind, _gaps), min_size=10, max_size=60)
).map(lambda drawn: [*_begin_on_disks(drawn[0]), *drawn[1]])
"""As `lives`, with a topic of two replicas, and brokers that start on other disks, some of them again on an old one."""
