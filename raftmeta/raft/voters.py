"""Voters: the file `meta.properties` of a metadata directory, and the guard against a voter that lost its data.

    meta.properties, one `key=value` a line, in this order
    format.version  1
    cluster.id      of the cluster, not empty
    node.id         the node that the directory belongs to
    directory.id    UUID, made when the directory was formatted
    voters          node ids, rising, separated by commas
    voter.state     VOTER or JOINING

A directory without the file is FRESH: its node has promised nothing yet. The empty log is made first, then the file. So
a log with entries but no file, or a file without a log, is damage: a voter without its log would have forgotten its
term, its vote and what it acknowledged.

A voter whose directory was emptied has forgotten its acknowledgements and its vote. If it voted again at once, it could
help to elect a leader that lacks committed entries. `JoinGuard` decides what such a node may do.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

from raftlog.errors import (
    CorruptRecordError,
    InconsistentClusterId,
    InconsistentVoters,
    InvalidConfig,
    StorageError,
    StorageFull,
    UnsupportedVersion,
)
from raftlog.v1 import raft_pb2
from raftlog.v1.raft_pb2 import FRESH, JOINING, VIRGIN, VOTER
from raftmeta.disk import DAMAGE_REMEDY, NO_SPACE, MetadataDisk
from raftmeta.raft.wal import has_log, unused_log

VoterStateValue: TypeAlias = "raft_pb2.VoterState.ValueType"
"""FRESH, VIRGIN, JOINING or VOTER, as in every hello."""
PROPERTIES_NAME = "meta.properties"
BEFORE_NAME = "meta.properties.before"
"""The file before `raftlog quorum set-voters`; the next start removes it and makes the change final."""
FORMAT_VERSION = 1
_KEYS = ("format.version", "cluster.id", "node.id", "directory.id", "voters", "voter.state")
_STATES = {"VOTER": VOTER, "JOINING": JOINING}
_STATE_NAMES = {state: name for name, state in _STATES.items()}
_OWNED_PREFIXES = ("wal-", "raft-snapshot-")
_OLD_FORMAT_NAME = "format"


@dataclass(frozen=True, slots=True)
class MetaProperties:
    """The content of `meta.properties`; `state` is VOTER or JOINING."""

    cluster_id: str
    node_id: int
    directory_id: uuid.UUID
    voters: tuple[int, ...]
    state: VoterStateValue

    def encode(self) -> bytes:
        """Return the file's content."""
        values = (
            str(FORMAT_VERSION),
            self.cluster_id,
            str(self.node_id),
            str(self.directory_id),
            ",".join(map(str, self.voters)),
            _STATE_NAMES[self.state],
        )
        return "".join(f"{key}={value}\n" for key, value in zip(_KEYS, values, strict=True)).encode()


def parse_properties(data: bytes, where: str) -> MetaProperties:
    """Return the parsed `meta.properties`.

    Raises:
        UnsupportedVersion: written by a newer version.
        CorruptRecordError: damaged.
    """
    lines = data.decode("utf-8", "replace").splitlines()
    values = dict(line.partition("=")[::2] for line in lines)
    version = values.get("format.version", "")
    if version.isdecimal() and int(version) > FORMAT_VERSION:
        raise UnsupportedVersion(
            f"{where} says format {version}, this version reads up to {FORMAT_VERSION}; run the version that wrote it"
        )
    try:
        found = MetaProperties(
            values["cluster.id"],
            int(values["node.id"]),
            uuid.UUID(values["directory.id"]),
            tuple(int(voter) for voter in values["voters"].split(",")),
            _STATES[values["voter.state"]],
        )
    except (KeyError, ValueError):
        found = None
    if found is None or found.encode() != data:
        raise CorruptRecordError(f"{where} is damaged: {_first_difference(data)}; {DAMAGE_REMEDY}")
    return found


def _first_difference(data: bytes) -> str:
    """Return a description of the first altered line, short enough for a message."""
    lines = data.split(b"\n")
    for number, key in enumerate(_KEYS):
        line = lines[number] if number < len(lines) else b""
        found = line.decode("utf-8", "replace")
        if not found.startswith(key + "=") or not found.isprintable() or "\ufffd" in found:
            return f"line {number + 1} is to be {key}=..., and is {found[:40]!r}"
    return "a value does not parse, or something is behind the last line"


def read_properties(disk: MetadataDisk) -> MetaProperties | None:
    """Return the properties of a directory, None if it is fresh."""
    names = disk.names()
    if PROPERTIES_NAME in names:
        properties = parse_properties(disk.read(PROPERTIES_NAME), f"{disk.path}/{PROPERTIES_NAME}")
        if not has_log(names):
            raise CorruptRecordError(
                f"{disk.path} belongs to node {properties.node_id}, and its log (wal-*) is missing: the node's term, "
                f"its vote and all that it acknowledged are lost; {DAMAGE_REMEDY}"
            )
        return properties
    if _OLD_FORMAT_NAME in names:
        raise InvalidConfig(
            f"{disk.path} holds the metadata of a version without a quorum; "
            "point metadata.log.dir to an empty directory, or run the version that wrote it"
        )
    found = sorted(name for name in names if name.startswith(_OWNED_PREFIXES) and not name.endswith(".tmp"))
    if found and (len(found) > 1 or unused_log(disk) is None):
        raise CorruptRecordError(
            f"{disk.path} holds metadata ({found[0]}) but {PROPERTIES_NAME} is missing; {DAMAGE_REMEDY}"
        )
    return None


def write_properties(disk: MetadataDisk, properties: MetaProperties, name: str = PROPERTIES_NAME) -> None:
    """Replace `meta.properties`, or the file of this name, durably."""
    temporary = name + ".tmp"
    disk.write(temporary, properties.encode())
    disk.sync(temporary)
    disk.rename(temporary, name)
    disk.sync_dir()


class MetadataDirectory:
    """A locked metadata directory whose properties fit the configuration. Use `open`."""

    def __init__(self, disk: MetadataDisk, properties: MetaProperties, fresh: bool) -> None:
        self.disk = disk
        self._properties = properties
        self._fresh = fresh

    @classmethod
    def open(
        cls,
        disk: MetadataDisk,
        node_id: int,
        cluster_id: str,
        voters: Iterable[int],
        new_directory_id: Callable[[], uuid.UUID] = uuid.uuid4,
    ) -> MetadataDirectory:
        """Lock the directory and check that it belongs to this node of this cluster.

        Raises:
            StorageError: another process uses it, or the disk failed.
            InvalidConfig: it belongs to another node, or to a version without a quorum.
            InconsistentClusterId: it belongs to another cluster.
            InconsistentVoters: it was made for other voters.
            UnsupportedVersion, CorruptRecordError: it cannot be read; nothing was changed.
        """
        wanted = tuple(sorted(voters))
        assert node_id in wanted
        assert cluster_id
        assert "\n" not in cluster_id
        try:
            disk.lock()
        except BlockingIOError:
            raise StorageError(f"{disk.path} is in use by another process; stop that one first") from None
        except OSError as error:
            raise StorageError(f"cannot use the metadata directory {disk.path}: {error}") from error
        try:
            found = read_properties(disk)
            if found is not None:
                _check_belongs(found, f"{disk.path}/{PROPERTIES_NAME}", node_id, cluster_id, wanted)
                if BEFORE_NAME in disk.names():
                    disk.remove(BEFORE_NAME)
                    disk.sync_dir()
                return cls(disk, found, fresh=False)
            directory_id = unused_log(disk) or new_directory_id()
            return cls(disk, MetaProperties(cluster_id, node_id, directory_id, wanted, VOTER), fresh=True)
        except OSError as error:
            disk.close()
            raise StorageError(f"cannot read the metadata directory {disk.path}: {error}") from error
        except BaseException:  # the directory must not stay locked
            disk.close()
            raise

    @property
    def state(self) -> VoterStateValue:
        """FRESH, JOINING or VOTER."""
        return FRESH if self._fresh else self._properties.state

    @property
    def cluster_id(self) -> str:
        """The cluster id."""
        return self._properties.cluster_id

    @property
    def node_id(self) -> int:
        """The node id."""
        return self._properties.node_id

    @property
    def directory_id(self) -> uuid.UUID:
        """The id of this directory; final once it is formatted."""
        return self._properties.directory_id

    @property
    def voters(self) -> tuple[int, ...]:
        """All voters, this node among them, rising."""
        return self._properties.voters

    def become(self, state: VoterStateValue) -> None:
        """Format a fresh directory, which has a log by now, or turn a joining one into a voter's; durable on return.

        Raises:
            StorageFull: there is no room; nothing was changed.
            StorageError: the disk failed; whether the new state is durable is unknown.
        """
        assert state in (JOINING, VOTER)
        assert has_log(self.disk.names()), "the log first: without it the file stands for damage"
        changed = replace(self._properties, state=state)
        try:
            write_properties(self.disk, changed)
        except OSError as error:
            if error.errno in NO_SPACE:
                raise StorageFull(
                    f"no space is left for {self.disk.path}/{PROPERTIES_NAME}: {error}; make room and restart"
                ) from error
            raise StorageError(
                f"cannot write {self.disk.path}/{PROPERTIES_NAME}: {error}; repair the disk and restart"
            ) from error
        self._properties, self._fresh = changed, False

    def close(self) -> None:
        """Unlock the directory."""
        self.disk.close()


def _check_belongs(found: MetaProperties, where: str, node_id: int, cluster_id: str, voters: tuple[int, ...]) -> None:
    if found.cluster_id != cluster_id:
        raise InconsistentClusterId(
            f"cluster.id={cluster_id}, but {where} says {found.cluster_id}; correct cluster.id or metadata.log.dir"
        )
    if found.node_id != node_id:
        raise InvalidConfig(
            f"node.id={node_id}, but {where} belongs to node {found.node_id}; correct node.id or metadata.log.dir"
        )
    if found.voters != voters:
        raise InconsistentVoters(
            f"controller.quorum.voters names {_list(voters)}, but {where} says {_list(found.voters)}; correct it, or "
            "stop all controllers and run `raftlog quorum set-voters` on each of them"
        )


def _list(ids: Sequence[int]) -> str:
    return ", ".join(map(str, ids))


class JoinGuard:
    """Decides what a node may do in the quorum, from what it has heard. Pure.

        FRESH ── only voter, or every other voter said FRESH or VIRGIN ─► VOTER
        FRESH ── another voter said something else, or sent entries ────► JOINING
        JOINING ── heard the hello of every other voter since the start: takes entries from here on, in the highest
                   term among them, in which it has no vote
                ── then applied a commit index that a leader told it in an entry of its own term ──► VOTER

    A joining node takes no entries before it has heard every other voter, because it may have voted in a term that it
    forgot: an acknowledgement in an older term would count for a leader that this vote deposed. Any candidate it can
    have voted for is among the voters it hears from, in that term or a later one.
    """

    def __init__(self, node_id: int, voters: Iterable[int], state: VoterStateValue) -> None:
        self._others = frozenset(voters) - {node_id}
        self._heard: dict[int, VoterStateValue] = {}
        self._highest_term = 0
        self._target: tuple[int, int] | None = None
        self.state = VOTER if state == FRESH and not self._others else state
        """The state that the node should have; its state on disk follows."""

    @property
    def may_vote(self) -> bool:
        """Whether the node may grant votes and campaign."""
        return self.state == VOTER

    @property
    def may_take_entries(self) -> bool:
        """Whether the node may take entries, acknowledge them, and confirm that a leader leads."""
        return self.state == VOTER or (self.state == JOINING and self._heard.keys() == self._others)

    @property
    def lowest_term(self) -> int:
        """The term that a joining node has to adopt, without a vote in it, before it takes entries."""
        return self._highest_term

    def heard(self, peer_id: int, state: VoterStateValue, term: int) -> None:
        """Note the hello of another voter."""
        if self.state == VOTER or peer_id not in self._others:
            return
        self._heard[peer_id] = state
        self._highest_term = max(self._highest_term, term)
        if self.state != FRESH:
            return
        if state not in (FRESH, VIRGIN):
            self.state = JOINING
        elif self._heard.keys() == self._others:
            self.state = VOTER

    def offered_entries(self) -> None:
        """Note that a leader has sent entries: there is a quorum with data."""
        if self.state == FRESH:
            self.state = JOINING

    def told_commit(self, term: int, commit_index: int) -> None:
        """Note the commit index that the leader of `term` told."""
        if self.state == JOINING and self.may_take_entries and self._target is None:
            self._target = (term, commit_index)

    def applied(self, last_applied: int, term_of: Callable[[int], int | None]) -> None:
        """Note the last applied index; `term_of` returns the term of the entry at an index.

        A new leader's commit index may lag until an entry of its own term is committed; only then it counts.
        """
        if self.state != JOINING or self._target is None:
            return
        term, commit_index = self._target
        if last_applied < commit_index:
            return
        if term_of(commit_index) == term:
            self.state = VOTER
        else:
            self._target = None
