"""The state of every node at the moment of a violation, for the analysis."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from raftmeta.image import NO_LEADER

if TYPE_CHECKING:
    from broker.partition.partition import Partition
    from tests.simulation.schedule import Simulation

SHOWN_EPOCHS = 8
"""The last so many entries of a log's leader epochs."""


def describe(simulation: Simulation) -> str:
    """Return the voters, the brokers, and each partition as its replicas have it."""
    return "\n".join([*_voters(simulation), *_brokers(simulation), *_partitions(simulation), *_paths(simulation)])


def _voters(simulation: Simulation) -> Iterator[str]:
    for node_id in simulation.voters:
        voter = simulation.voter_on(node_id)
        if voter is None:
            yield f"controller {node_id}: does not run"
            continue
        node, wal = voter.node, voter.wal
        yield (
            f"controller {node_id}: {node.role} in term {node.term}, log {wal.first_index} to {wal.last_index}, synced "
            f"{wal.synced_index} and term {wal.synced_term}, committed {node.commit_index}, applied "
            f"{node.last_applied}{', serves' if voter.controller.serving else ''}"
            f"{', stands still' if voter.process.paused else ''}"
        )


def _brokers(simulation: Simulation) -> Iterator[str]:
    image = simulation.invariants.truth
    yield f"image at {image.offset} of controller epoch {image.controller_epoch}, {len(image.topics)} topics"
    for broker_id in simulation.broker_ids:
        known, broker = image.brokers.get(broker_id), simulation.brokers.get(broker_id)
        registered = "not registered"
        if known is not None:
            registered = f"registered with epoch {known.broker_epoch}{', fenced' if known.fenced else ''}"
        if broker is None:
            yield f"broker {broker_id}: does not run, {registered}"
            continue
        simulation.enter(broker.host)
        yield (
            f"broker {broker_id}: {registered}, runs with epoch {broker.broker_epoch}, image {broker.image.offset}, "
            f"{'has a lease' if broker.has_lease() else 'no lease'}{', stands still' if broker.process.paused else ''}"
        )


def _partitions(simulation: Simulation) -> Iterator[str]:
    for topic_id, topic in simulation.invariants.truth.topics.items():
        for part in topic.partitions:
            leader = "no leader" if part.leader == NO_LEADER else f"leader {part.leader}"
            yield (
                f"{topic.name}-{part.partition}: {leader} in epoch {part.leader_epoch}, partition epoch "
                f"{part.partition_epoch}, replicas {part.replicas}, ISR {part.isr}, eligible "
                f"{part.eligible_leader_replicas}"
            )
            for node_id in part.replicas:
                broker = simulation.brokers.get(node_id)
                find = getattr(broker, "find", None)
                replica: Partition | None = None if find is None else find((topic_id, part.partition))
                if replica is not None:
                    yield f"  on {node_id}: {_replica(replica)}"


def _replica(replica: Partition) -> str:
    log = replica.log
    epochs = [f"{each.leader_epoch} from {each.start_offset}" for each in log.leader_epochs.entries[-SHOWN_EPOCHS:]]
    return (
        f"{'leads' if replica.leads else 'follows'} in epoch {replica.leader_epoch}, log {log.log_start_offset} to "
        f"{log.log_end_offset}, durable to {log.flushed_end_offset}, high watermark {log.high_watermark}, leader "
        f"epochs: {', '.join(epochs) or 'none'}"
    )


def _paths(simulation: Simulation) -> Iterator[str]:
    if simulation.network.cuts:
        yield f"cut paths: {sorted(simulation.network.cuts)}"
