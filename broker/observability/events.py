"""Names of state transitions, the field `event` of a log line. The names are stable, for searches and alarms.

Each node that takes part in a transition logs one line with its event.
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
        "logs_recovering": "The broker is recovering its logs. Logged every five seconds: `of` is the number of logs, "
        "`identified` that of logs whose metadata is read, `recovered` that of logs that are done.",
        "logs_recovered": "All logs are open, or set aside as damaged.",
        "broker_registered": "The controller has given this broker its epoch.",
        "node_ready": "The node serves.",
        "broker_stopping": "The controlled shutdown has begun.",
        "broker_stopped": "Logs are flushed and closed.",
        "node_stopped": "The process ends without an error.",
        "event_loop_late": "The event loop was blocked for longer than 250 ms.",
        "garbage_collected": "A whole collection of garbage has stopped the process for `ms`; `kept` objects live on.",
        "log_level_changed": "An administrator has changed the level of a logger.",
        # Users
        "users_file_read": "The file `sasl.users.location` has changed, and its users are in effect.",
        "oauth_keys_read": "The public keys of the tokens' issuer were read, for OAUTHBEARER, with their number.",
        "streams_ended": "Streams ended: their users' passwords have changed, the users were deleted, or their tokens "
        "have expired.",
        "revoked_nodes_disconnected": "Connections of nodes were closed, since their certificates have been revoked; "
        "`nodes` and `peers` name them.",
        # Limits
        "connections_refused": "Connections of an address were refused, once a minute; `limit` names the key.",
        "logins_refused": "Logins of an address were refused because there were too many at a time; once a minute.",
        "streams_refused": "Calls of a user or an address were refused, once a minute; `limit` names the key, or is "
        "`untaken answers`.",
        "ids_refused": "A user has made as many groups, or transactional ids and sinks, as it may, and wants more, or "
        "its transactions have named as many groups as they may; once a minute; `limit` names the key.",
        # Kafka clients
        "kafka_disconnected": "The broker disconnected a Kafka client because of its request; `reason` says why.",
        # The right to serve
        "lease_granted": "This broker has a lease and serves.",
        "lease_ended": "This broker serves nothing until it has a lease again; `reason` says why.",
        "heartbeats_answered": "The active controller answers this broker's heartbeats.",
        "heartbeats_lost": "No controller answers this broker's heartbeats.",
        "controller_changed": "This broker has learned of another controller epoch.",
        # Partitions
        "leader_gained": "This broker leads a partition in a new leader epoch.",
        "leader_lost": "This broker no longer leads a partition.",
        "leaderships_changed": "The numbers of gained and lost leaderships of one metadata change, if more than one.",
        "unclean_leader_gained": "This broker leads after an unclean election: committed records may be lost.",
        "replica_log_lost": "The log was lost with this broker's disk and no other replica was in sync: no leader.",
        "partition_closed": "This broker no longer serves a replica.",
        "producers_forgotten": "The logs remembered more than 500,000 producers together (`of`), so those with the "
        "most have forgotten `count` idle ones before `producer.id.expiration.ms`.",
        "isr_changed": "The controller has committed a change of the ISR that this leader asked for.",
        "isr_change_refused": "The controller has refused a change of the ISR that this leader asked for.",
        "leader_connected": "This broker follows a leader's partitions.",
        "leader_connection_lost": "This broker's stream to a leader broke.",
        "leader_unreachable": "For five seconds this broker could not reach a leader that it follows.",
        "log_truncated": "A follower removes the records that its leader does not have.",
        "log_started_over": "A follower removes all records, and begins at its leader's log start.",
        "log_damaged": "A log is damaged; its replica is closed.",
        "log_missing": "A checkpoint lists a log whose directory is gone; its replica is closed.",
        "checkpoint_lost": "A log directory has lost its offset-checkpoint, so it cannot tell which logs it had.",
        "log_dir_offline": "A log directory has failed, for as long as the process runs.",
        "storage_full": "A log directory is full and refuses writes; other replicas lead where they can.",
        "storage_has_space": "For a minute, no write was refused because a log directory was full.",
        "replicas_offline": "The controller has recorded which replicas have no working log on this broker.",
        "coordinator_loaded": "A coordinator of groups or transactions has read its partition.",
        "internal_topic_made": "An internal topic was created for its first use.",
        # The quorum
        "controller_active": "This node is the active controller, in this controller epoch.",
        "controller_inactive": "This node is no longer the active controller.",
        "broker_fenced": "The active controller takes a broker out of service.",
        "broker_unfenced": "The active controller puts a broker back into service.",
        "preferred_election": "The active controller moves leaderships back to the first replicas.",
        "raft_campaign": "This voter stands for election.",
        "metadata_disk_full": "This voter cannot stand for election: the disk of its metadata is full.",
        "raft_leader_gained": "This voter was elected.",
        "raft_leader_lost": "This voter no longer leads.",
        "raft_membership_changed": "This voter may vote, or has to catch up before it may.",
        "raft_snapshot_taken": "This voter took a snapshot, so its metadata log begins later.",
        "raft_snapshot_installed": "This voter was too far behind, and continues from the leader's snapshot.",
        "controller_connected": "A voter has a connection to another voter.",
        "controller_lost": "A voter has lost its connection to another voter.",
        "metadata_watched": "A broker without a vote watches the metadata of a node.",
        "metadata_unwatched": "A broker without a vote has lost its watch of a node's metadata.",
    }
)
