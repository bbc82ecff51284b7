"""A leader change, told by the metadata log: tests/golden/metadata_failover.txt.

`RAFTLOG_REGENERATE_GOLDEN=1 ./dev test tests/unit/raftmeta/test_golden_failover.py` rewrites it; review the diff.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from raftlog.errors import RaftlogError
from raftlog.v1.records_pb2 import MetadataCommand, MetadataRecord
from raftmeta.decide import decide
from raftmeta.elections import unsettled
from raftmeta.image import NO_LEADER, MetadataImage
from raftmeta.replay import replay_all
from tests.support import metadata as make

FILE = Path(__file__).parents[2] / "golden" / "metadata_failover.txt"
ORDERS = make.refs((1, 0))


def script() -> Iterator[str]:
    """Play the scenario and tell it, an entry a paragraph."""
    image = MetadataImage()

    def told(sentence: str, command: MetadataCommand) -> str:
        nonlocal image
        offset = image.offset + 1
        decision = decide(image, command, offset)
        lines = [sentence]
        if isinstance(decision.outcome, RaftlogError):
            lines.append(f"  refused: {decision.outcome}")
        lines += [f"  {offset:3}  {line}" for line in map(shown, decision.records)]
        if decision.records:
            image = replay_all(image, decision.records, offset)
        return "\n".join(lines) + "\n"

    def epoch(broker_id: int) -> int:
        return make.broker_epoch(image, broker_id)

    def settle(handed_over: bool = False) -> MetadataCommand:
        return make.elect(ORDERS if handed_over else list(unsettled(image)), handed_over=handed_over)

    yield told("Controller 1 is elected in term 1.", make.claim())
    for broker in (1, 2, 3):
        yield told(f"Broker {broker} starts for the first time.", make.register(broker))
        yield told(
            f"Broker {broker} has caught up with the metadata and is let in.", make.unfence(broker, epoch(broker))
        )
    configs = {"min.insync.replicas": "2"}
    yield told("Somebody creates a topic.", make.create_topic("orders", 1, 1, 3, configs))
    yield told("Broker 1 is silent for a session, and has no lease any more.", make.fence(1, epoch(1)))
    yield told("Its partition gets another leader from the ISR.", settle())
    late = make.alter_partition(image, [2, 3, 1])
    late.alter_partition.leader_epoch, late.alter_partition.broker_id = 0, 1
    late.alter_partition.broker_epoch = epoch(1)
    yield told("Broker 1 wakes up and still believes it leads.", late)
    yield told("It dies and comes back as another process, without a clean-shutdown mark.", make.register(1, 2))
    yield told("Nothing of it is in sync, so it is let in.", make.unfence(1, epoch(1)))
    yield told("It has caught up, says the leader.", make.alter_partition(image, [2, 3, 1]))
    yield told("Broker 3 is fenced.", make.fence(3, epoch(3)))
    yield told("It leaves the ISR; two remain, which is enough.", settle())
    yield told("Broker 1 is fenced.", make.fence(1, epoch(1)))
    yield told("One remains, too few to commit anything: broker 1 stays eligible.", settle())
    yield told("The leader is fenced too.", make.fence(2, epoch(2)))
    yield told("Nobody leads; the last one in sync stays.", settle())
    yield told("Broker 1 is heard again.", make.unfence(1, epoch(1)))
    yield told("It holds every committed record, and leads.", settle())
    yield told("Broker 2 is heard again.", make.unfence(2, epoch(2)))
    yield told("It has caught up, says the leader.", make.alter_partition(image, [1, 2]))
    yield told("Broker 1 is to be restarted, and asks to shut down.", make.begin_shutdown(1, epoch(1)))
    yield told("Its leadership is taken from it; until it has let go nobody leads.", settle())
    yield told("It has applied that, and the next one takes over.", settle(handed_over=True))
    yield told("Broker 1 starts again after its clean stop.", make.register(1, 3, previous_epoch=epoch(1)))
    yield told("It is let in.", make.unfence(1, epoch(1)))
    yield told("It has caught up, says the leader.", make.alter_partition(image, [1, 2]))
    yield told("The disk under broker 2 fails: it serves no more, and says so.", make.offline_replicas(image, 2))
    yield told("The disk under broker 1 fails as well; it is the last one in sync.", make.offline_replicas(image, 1))
    yield told("Broker 1 is stopped, gets its disk back, and starts.", make.register(1, 4, previous_epoch=epoch(1)))
    yield told("What it said before is void.", settle())
    yield told("It is let in.", make.unfence(1, epoch(1)))
    yield told("It leads.", settle())
    yield told("Broker 2 has a new disk, and has caught up, says the leader.", make.alter_partition(image, [1, 2]))


def shown(record: MetadataRecord) -> str:
    """Return a record in a line."""
    match record.WhichOneof("record"):
        case "controller":
            return f"controller {record.controller.controller_id}, epoch {record.controller.controller_epoch}"
        case "broker":
            broker = record.broker
            state = "fenced" if broker.fenced else "up"
            more = (", back from an unclean stop" * broker.unclean) + (
                ", shutting down" * broker.in_controlled_shutdown
            )
            return f"broker {broker.broker_id}, epoch {broker.broker_epoch}: {state}{more}"
        case "partition":
            part = record.partition
            leader = "nobody leads" if part.leader == NO_LEADER else f"{part.leader} leads"
            line = f"partition {part.partition}: {leader} in epoch {part.leader_epoch}, in sync {list(part.isr)}"
            if part.eligible_leader_replicas:
                line += f", eligible {list(part.eligible_leader_replicas)}"
            if part.offline_replicas:
                line += f", without a log {[each.broker_id for each in part.offline_replicas]}"
            if part.HasField("revoked_leader"):
                line += f", {part.revoked_leader} lets go once it has applied {part.revoked_at_offset}"
            return f"{line}; version {part.partition_epoch}"
        case "topic":
            return f"topic {record.topic.name}"
        case "config":
            return f"config {record.config.key}={record.config.value}"
        case kind:
            return f"{kind}"


def test_the_story_of_a_failover() -> None:
    story = "\n".join(script())
    if os.environ.get("RAFTLOG_REGENERATE_GOLDEN"):
        FILE.write_text(story)
    assert story == FILE.read_text()
