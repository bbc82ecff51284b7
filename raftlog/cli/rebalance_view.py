"""What a cluster holds where, as rebalancing sees it, and how a plan is shown before anybody carries it out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import raftlog
from raftlog._core.rebalance import Load, Placement, copied_bytes, loads
from raftlog._core.rebalance_board import BrokerPlace
from raftlog._descriptions import BrokerDescription, TopicDescription
from raftlog.cli import partition_health as health
from raftlog.cli.moving import all_topics
from raftlog.cli.output import Output, counted, print_json, print_note, print_rows
from raftlog.cli.plans import Move, plan_of, present
from raftlog.config import BYTES_PER_UNIT
from raftlog.errors import RaftlogError
from raftlog.types import TopicPartition

PATIENCE_S: Final = 5.0
"""How long a broker is asked how much it holds: a plan is worth showing without that."""

_MOVE_COLUMNS: Final = ("topic", "partition", "replicas", "wanted", "adding", "size")
_LOAD_COLUMNS: Final = (
    "broker_id",
    "rack",
    "state",
    "replicas",
    "replicas_after",
    "preferred",
    "preferred_after",
    "size",
    "size_after",
)


class Picture(NamedTuple):
    """The cluster. `placed`: where partitions are, or are going. `sizes`: bytes of a replica; `free`: of brokers."""

    brokers: list[BrokerDescription]
    topics: dict[str, TopicDescription]
    placed: dict[TopicPartition, tuple[int, ...]]
    sizes: dict[TopicPartition, int]
    free: dict[int, int]

    def broker(self, broker_id: int) -> BrokerDescription | None:
        """Return a broker that is registered."""
        return next((each for each in self.brokers if each.broker_id == broker_id), None)

    def places(self, leaving: int | None = None) -> list[BrokerPlace]:
        """Return who may be given what. Who is fenced, stopping, drained or cordoned takes no replicas."""
        return [
            BrokerPlace(
                each.broker_id,
                each.rack,
                takes=_is_up(each) and not each.cordoned and not each.drained,
                leads=_is_up(each) and not each.drained,
                leaves=each.broker_id == leaving,
            )
            for each in self.brokers
        ]

    def moves_to(self, after: Placement) -> list[Move]:
        """Return what changes; what is copied first, then what only gets another order."""
        changed = [Move(part, tuple(after[part])) for part in sorted(after) if tuple(after[part]) != self.placed[part]]
        return sorted(changed, key=lambda move: set(move.replicas) == set(self.placed[move.part]))


def _is_up(broker: BrokerDescription) -> bool:
    return not broker.fenced and not broker.in_controlled_shutdown


def look(admin: raftlog.Admin) -> Picture:
    """Ask what there is; of brokers that do not say how much they hold with a note."""
    brokers = admin.describe_cluster(linearizable=True).brokers
    topics = all_topics(admin)
    sizes: dict[TopicPartition, int] = {}
    free: dict[int, int] = {}
    for broker in brokers:
        if broker.fenced:
            continue
        try:
            found = admin.describe_log_dirs(broker.broker_id, timeout=PATIENCE_S)
        except RaftlogError as error:
            print_note(f"note: how much broker {broker.broker_id} holds is not known: {error}")
            continue
        free[broker.broker_id] = sum(each.usable_bytes for each in found if each.error is None)
        for log in (log for log_dir in found for log in log_dir.partitions):
            part = TopicPartition(log.topic, log.partition)
            sizes[part] = max(sizes.get(part, 0), log.size_bytes)
    placed = {move.part: move.replicas for move in present(topics.values())}
    return Picture(brokers, topics, placed, {part: sizes.get(part, 0) for part in placed}, free)


# Showing a plan


def show(picture: Picture, moves: Sequence[Move], output: Output) -> None:
    """Print what would move and what brokers have before and after; as JSON the plan alone."""
    if output is Output.JSON:
        print_json(plan_of(moves))
        return
    print_rows([_row(picture, move) for move in moves], _MOVE_COLUMNS, output)
    after = {**picture.placed, **{move.part: move.replicas for move in moves}}
    ids = [each.broker_id for each in picture.brokers]
    before, then = loads(picture.placed, ids, picture.sizes), loads(after, ids, picture.sizes)
    print()
    print_rows([_load_row(picture, each, before, then) for each in sorted(before | then)], _LOAD_COLUMNS, output)
    print(f"\n{summary(picture, moves)}")


def summary(picture: Picture, moves: Sequence[Move]) -> str:
    """Say in a sentence what a plan takes."""
    copied = [move for move in moves if set(move.replicas) != set(picture.placed[move.part])]
    size = copied_bytes(picture.placed, {move.part: move.replicas for move in moves}, picture.sizes)
    turned = len(moves) - len(copied)
    said = f"{counted(len(copied), 'partition')} to move, {size_text(size)} to copy"
    return f"{said}; {counted(turned, 'partition')} with another order only" if turned else said


def warn_of_space(picture: Picture, moves: Sequence[Move]) -> None:
    """Warn of brokers whose disks have less room than the plan needs there, while it is under way."""
    needed: dict[int, int] = {}
    for move in moves:
        for broker_id in set(move.replicas) - set(picture.placed[move.part]):
            needed[broker_id] = needed.get(broker_id, 0) + picture.sizes[move.part]
    for broker_id, size in sorted(needed.items()):
        if broker_id in picture.free and size > picture.free[broker_id]:
            print_note(
                f"warning: broker {broker_id} gets {size_text(size)} and has {size_text(picture.free[broker_id])} "
                "free; give it more space, or delete records, first"
            )


def size_text(size_bytes: int) -> str:
    """Return a number of bytes in the unit that fits, as settings take it but rounded."""
    unit, scale = max(
        (each for each in BYTES_PER_UNIT.items() if each[1] <= max(1, size_bytes)), key=lambda each: each[1]
    )
    return f"{size_bytes} B" if unit == "B" else f"{size_bytes / scale:.1f} {unit}"


def _row(picture: Picture, move: Move) -> dict[str, object]:
    now = picture.placed[move.part]
    adding = [replica for replica in move.replicas if replica not in now]
    return {
        "topic": move.part.topic,
        "partition": move.part.partition,
        "replicas": now,
        "wanted": move.replicas,
        "adding": adding,
        "size": size_text(picture.sizes[move.part] * len(adding)) if adding else None,
    }


def _load_row(
    picture: Picture, broker_id: int, before: Mapping[int, Load], after: Mapping[int, Load]
) -> dict[str, object]:
    broker = picture.broker(broker_id)
    now, then = before.get(broker_id, Load()), after.get(broker_id, Load())
    return {
        "broker_id": broker_id,
        "rack": broker.rack if broker is not None else None,
        "state": health.broker_row(broker, Output.TABLE)["state"] if broker is not None else "not registered",
        "replicas": now.replicas,
        "replicas_after": then.replicas,
        "preferred": now.leaderships,
        "preferred_after": then.leaderships,
        "size": size_text(now.size_bytes),
        "size_after": size_text(then.size_bytes),
    }
