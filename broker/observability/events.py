"""Names of state transitions: the field `event` of a log line. Stable, for searches and alarms on gathered logs.

A line with an event is written once for each transition, where it happens, on every node that takes part in it.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

EVENTS: Final[Mapping[str, str]] = MappingProxyType(
    {
        # The node
        "node_starting": "The process has read its configuration.",
        "metadata_ready": "The node knows its cluster and has an image of the metadata.",
        "logs_recovering": "A tenth more of many logs is recovered.",
        "logs_recovered": "All logs are open, or set aside as damaged.",
        "broker_registered": "The controller has given this broker its epoch.",
        "node_ready": "The node serves.",
        "broker_stopping": "The controlled shutdown has begun.",
        "broker_stopped": "Logs are flushed and closed.",
        "node_stopped": "The process ends, without an error.",
        "event_loop_late": "The event loop was held up for longer than 250 ms.",
        "log_level_changed": "Somebody has changed how much a logger writes.",
        # Users
        "users_file_read": "The file `sasl.users.location` has changed, and what it says counts.",
        "streams_ended": "Streams of users whose passwords have changed, or who are gone.",
        # The right to serve
        "lease_granted": "This broker serves.",
        "lease_ended": "This broker serves nothing until it has a lease again; `reason` says why.",
        "heartbeats_answered": "The active controller answers this broker's heartbeats.",
        "heartbeats_lost": "No controller answers them.",
        "controller_changed": "This broker has heard of another controller epoch.",
        # Partitions
        "leader_gained": "This broker leads a partition in a new leader epoch.",
        "leader_lost": "This broker leads a partition no more.",
        "leaderships_changed": "How many of both came of one change of the metadata, if more than one.",
        "unclean_leader_gained": "This broker leads after an unclean election: committed records may be lost.",
        "replica_log_lost": "The log went with this broker's disk, and nobody else was in sync: nobody leads.",
        "partition_closed": "A replica serves nothing more here.",
        "isr_changed": "The controller has committed a change of the ISR that this leader asked for.",
        "isr_change_refused": "It has not.",
        "leader_connected": "This broker follows a leader's partitions.",
        "leader_connection_lost": "Its stream to a leader broke.",
        "log_truncated": "A follower drops what its leader does not have.",
        "log_started_over": "A follower drops everything, and begins at its leader's log start.",
        "log_damaged": "A log does not check; its replica is closed.",
        "log_dir_offline": "A log directory has failed, for as long as the process runs.",
        "replicas_offline": "The controller knows which replicas have no working log here.",
        "coordinator_loaded": "A coordinator of groups or transactions has read its partition.",
        "internal_topic_made": "An internal topic was made, for its first use.",
        # The quorum
        "controller_active": "This node decides, in this controller epoch.",
        "controller_inactive": "It decides no more.",
        "broker_fenced": "The active controller takes a broker out of service.",
        "broker_unfenced": "It takes it back.",
        "preferred_election": "It moves leaderships back to the first replicas.",
        "raft_campaign": "This voter stands for election.",
        "raft_leader_gained": "It was elected.",
        "raft_leader_lost": "It leads no more.",
        "raft_membership_changed": "It votes, or has to catch up before it does.",
        "raft_snapshot_taken": "The metadata log begins later now.",
        "raft_snapshot_installed": "It was too far behind, and has gone on from the leader's snapshot.",
        "controller_connected": "A voter has a connection to another one.",
        "controller_lost": "It has none.",
        "metadata_watched": "A broker without a vote hears of the metadata from a node.",
        "metadata_unwatched": "It does not any more.",
    }
)
