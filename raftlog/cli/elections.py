"""Leaders by hand: which partitions it is about, and who leads them afterwards."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Final

import raftlog
from raftlog._descriptions import PartitionDescription, PartitionReplicas
from raftlog.cli.output import Output, print_done, print_error, print_json
from raftlog.cli.partition_health import why_lost_of
from raftlog.errors import ElectionNotNeeded, RaftlogError
from raftlog.types import TopicPartition

PATIENCE_S: Final = 5.0
"""How long a leader may take to let go, and the next one to be found."""
_LOOK_EVERY_S: Final = 0.1
_LAGS_PATIENCE_S: Final = 3.0


def run(admin: raftlog.Admin, topic: str, partitions: Sequence[int], output: Output, *, unclean: bool) -> bool:
    """Elect leaders where that changes something, and name them; return whether all partitions are led as asked.

    Raises:
        RaftlogError: nothing was changed; says why.
    """
    admin.describe_cluster(linearizable=True)
    before = {part.partition: part for part in admin.describe_topic(topic).partitions}
    chosen = [
        number for number in sorted(set(partitions)) or before if number not in before or _open(before[number], unclean)
    ]
    try:
        if not chosen:
            raise ElectionNotNeeded("every partition is led as asked")
        admin.elect_leaders(topic, chosen, unclean=unclean)
    except ElectionNotNeeded:
        which = f"{', '.join(f'{topic}-{each}' for each in sorted(set(partitions)))}" if partitions else ""
        what = "a leader" if unclean else "its first replica"
        verb = "has" if unclean else "is led by"
        sentence = f"every partition of {topic} {verb} {what}" if not which else f"{which} {verb} {what}"
        print_done(f"nothing to do: {sentence}", {"topic": topic, "unclean": unclean, "partitions": []}, output)
        return True
    after = _await(admin, topic, chosen)
    ends = _ends(admin, topic) if unclean else {}
    left = [part for part in after if _open(part, unclean)]
    if output is Output.JSON:
        print_json({"topic": topic, "unclean": unclean, "partitions": [_document(topic, each, ends) for each in after]})
    else:
        for part in after:
            if part not in left:
                print(_sentence(topic, part, ends))
    for part in left:
        print_error(f"{topic}-{part.partition} is not led as asked: {_why_open(topic, part)}")
    return not left


def _open(part: PartitionDescription, unclean: bool) -> bool:
    """Whether an election of this kind is for this partition."""
    return part.leader < 0 if unclean else part.leader != part.replicas[0]


def _why_open(topic: str, part: PartitionDescription) -> str:
    if (why := why_lost_of(topic, part)) is not None:
        return f"nobody leads it: {why}"
    who = f"broker {part.leader} leads it" if part.leader >= 0 else "nobody leads it"
    first = part.replicas[0]
    state = "is not up" if first in part.offline_replicas else "is in sync" if first in part.isr else "is not in sync"
    return f"{who}, its first replica {first} {state}"


def _await(admin: raftlog.Admin, topic: str, chosen: Sequence[int]) -> list[PartitionDescription]:
    """Return the chosen partitions once all have leaders, or as they are after a while."""
    deadline = time.monotonic() + PATIENCE_S
    while True:
        found = [part for part in admin.describe_topic(topic).partitions if part.partition in chosen]
        # A leader lets go before another is elected; one whose place nobody can take has kept its partition.
        if not any(part.leader < 0 for part in found) or time.monotonic() >= deadline:
            return found
        time.sleep(_LOOK_EVERY_S)


def _ends(admin: raftlog.Admin, topic: str) -> dict[TopicPartition, PartitionReplicas]:
    try:
        return admin.describe_replicas([topic], timeout=_LAGS_PATIENCE_S)
    except RaftlogError:
        return {}


def _document(topic: str, part: PartitionDescription, ends: dict[TopicPartition, PartitionReplicas]) -> dict[str, Any]:
    seen = ends.get(TopicPartition(topic, part.partition))
    end = {} if seen is None else {"log_end_offset": seen.log_end_offset}
    return {"partition": part.partition, "leader": part.leader, "leader_epoch": part.leader_epoch, **end}


def _sentence(topic: str, part: PartitionDescription, ends: dict[TopicPartition, PartitionReplicas]) -> str:
    seen = ends.get(TopicPartition(topic, part.partition))
    end = "" if seen is None else f"; its log ends at offset {seen.log_end_offset}"
    return f"{topic}-{part.partition} is led by broker {part.leader} now, in leader epoch {part.leader_epoch}{end}"
