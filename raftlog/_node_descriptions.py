"""What the admin clients say of single nodes: plain named tuples."""

from __future__ import annotations

from typing import NamedTuple

from raftlog._descriptions import ConfigDescription
from raftlog.errors import RaftlogError, from_wire
from raftlog.v1 import admin_pb2, node_pb2


class LoopLagDescription(NamedTuple):
    """By how much a node's event loop woke too late, since its process began. Shares are from 0 to 1."""

    measurements: int
    largest_ms: float
    share_above_10_ms: float
    share_above_100_ms: float


class OpenFilesDescription(NamedTuple):
    """How many files a node has open, -1: not known, and how many it may have; -1: any number."""

    used: int
    soft_limit: int
    hard_limit: int


class VoterDescription(NamedTuple):
    """A controller's own view of the metadata log. `role`: leader, candidate or follower; `leader_id` -1: unknown."""

    role: str
    term: int
    leader_id: int
    commit_index: int
    applied_index: int
    last_index: int
    snapshot_index: int


class NodeLogDirDescription(NamedTuple):
    """One directory of a node: of partitions, or with `metadata` of the metadata log. `error`: why it is offline.

    `usable_bytes` of `total_bytes` are free on its file system; its partitions take `log_bytes`.
    """

    path: str
    metadata: bool
    error: RaftlogError | None
    total_bytes: int
    usable_bytes: int
    log_bytes: int
    partitions: int


class NodeDescription(NamedTuple):
    """One node, broker or controller or both, as it says itself.

    `clock_offset_ms`: by how much its clock is ahead of the one here, give or take `clock_uncertainty_ms`, half of the
    time that the answer took. `not_ready`: why it does not serve at the moment, "" when it does. Listeners are
    host:port, "" where there is none. `log_file`: "" when its log goes elsewhere. `voter`: None without a vote.
    `features`: the lowest and the highest level that its software knows. `configs`: those in effect, without
    documentation and with [hidden] in place of secrets. `certificate_expires_ms`: Unix time, 0: it has none.
    `asked_through`: the address that answered; another broker's
    when the node cannot be reached from here.
    """

    node_id: int
    cluster_id: str
    version: str
    roles: list[str]
    clock_offset_ms: float
    clock_uncertainty_ms: float
    uptime_ms: int
    not_ready: str
    hostname: str
    pid: int
    python_version: str
    platform: str
    client_listener: str
    inter_node_listener: str
    metrics_listener: str
    log_file: str
    metadata_offset: int
    controller_id: int
    controller_epoch: int
    loop_lag: LoopLagDescription
    open_files: OpenFilesDescription
    voter: VoterDescription | None
    log_dirs: list[NodeLogDirDescription]
    features: dict[str, tuple[int, int]]
    configs: dict[str, ConfigDescription]
    certificate_expires_ms: int
    asked_through: str


_PLAIN = (
    "uptime_ms",
    "not_ready",
    "hostname",
    "pid",
    "python_version",
    "platform",
    "client_listener",
    "inter_node_listener",
    "metrics_listener",
    "log_file",
    "metadata_offset",
    "controller_id",
    "controller_epoch",
    "certificate_expires_ms",
)


def describe_node(
    info: node_pb2.NodeInfo, asked_ms: float, round_trip_ms: float, asked_through: str
) -> NodeDescription:
    """Return a node as users see it. `asked_ms`: Unix time here when it was asked."""
    return NodeDescription(
        node_id=info.node_id,
        cluster_id=info.cluster_id,
        version=info.version,
        roles=list(info.roles),
        clock_offset_ms=round(info.wall_clock_ms - (asked_ms + round_trip_ms / 2), 1),
        clock_uncertainty_ms=round(round_trip_ms / 2 + 1, 1),  # both clocks are read in whole milliseconds
        **{field: getattr(info, field) for field in _PLAIN},
        loop_lag=LoopLagDescription(*(getattr(info.loop_lag, field) for field in LoopLagDescription._fields)),
        open_files=OpenFilesDescription(*(getattr(info.open_files, field) for field in OpenFilesDescription._fields)),
        voter=(
            VoterDescription(*(getattr(info.voter, field) for field in VoterDescription._fields))
            if info.HasField("voter")
            else None
        ),
        log_dirs=[
            NodeLogDirDescription(
                each.path,
                each.metadata,
                from_wire(each.error) if each.error.code else None,
                each.total_bytes,
                each.usable_bytes,
                each.log_bytes,
                each.partitions,
            )
            for each in info.log_dirs
        ],
        features={each.name: (each.min_level, each.max_level) for each in info.features},
        configs={
            each.key: ConfigDescription(
                each.key, each.value, admin_pb2.ConfigEntry.Source.Name(each.source).lower(), each.read_only, ""
            )
            for each in info.configs
        },
        asked_through=asked_through,
    )
