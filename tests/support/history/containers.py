"""The history of a run on containers, out of what `tests/chaos/operations.py` records."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import permutations
from typing import Final, get_args

from tests.chaos.operations import Operation as Recorded
from tests.support.history import timeline
from tests.support.history.model import Condition, Cut, Fault, History, Ill, Kind, Operation
from tests.support.history.recorder import RoleWatch

_ILL: Final[dict[str, Ill]] = {
    "Kill": "dead",
    "Pause": "paused",
    "Loss": "hampered",
    "SlowLink": "hampered",
    "FullDisk": "hampered",
    "ClockShift": "hampered",
}
_KINDS: Final[dict[str, Kind]] = {"append": "send", **{kind: kind for kind in get_args(Kind)}}


def of_run(
    title: str, recorded: Iterable[Recorded], nodes: Sequence[int], voters: Sequence[int], until_s: float
) -> History:
    """Return a history: faults with what each does to its victim, everything else as operations of clients.

    Names of faults are those of the classes of `tests/chaos/faults.py`, with whatever behind; joined by " + ".
    """
    history = History(title, nodes, voters, until_s=until_s)
    for each in recorded:
        if each.kind == "fault":
            targets = () if each.node is None else (each.node,)
            history.faults.append(Fault(each.who, each.started_s, each.ended_s, targets))
            for name in each.who.split(" + "):
                _suffer(history, name.split()[0], each)
        else:
            kind = _KINDS.get(each.kind, "admin")
            history.operations.append(
                Operation(
                    each.who, kind, each.started_s, each.ended_s, each.outcome, each.partition, each.node, each.detail
                )
            )
    return history


@contextmanager
def drawn(
    title: str,
    nodes: Sequence[int],
    voters: Sequence[int],
    roles: RoleWatch,
    recorded: Callable[[], Iterable[Recorded]],
    noted: Callable[[], Iterable[Operation]],
) -> Iterator[None]:
    """Draw the history of a block, however it ends, from the recorded operations and the clients' own notes."""
    roles.start()
    error: BaseException | None = None
    try:
        yield
    except BaseException as caught:
        error = caught
        raise
    finally:
        roles.close()
        history = of_run(title, recorded(), nodes, voters, time.monotonic())
        history.operations += noted()
        history.reigns = roles.reigns
        timeline.draw(history, [], error)


def _suffer(history: History, name: str, fault: Recorded) -> None:
    """Note the victim's condition and the cut links while a fault lasts."""
    if name in _ILL and fault.node is not None:
        history.conditions.append(Condition(fault.node, _ILL[name], fault.started_s, fault.ended_s))
    history.cuts += [
        Cut(sender, receiver, fault.started_s, fault.ended_s)
        for sender, receiver in cut_links(name, fault.node, history.nodes)
    ]


def cut_links(name: str, victim: int | None, nodes: Sequence[int]) -> list[tuple[int, int]]:
    """Return which senders a fault keeps from which receivers."""
    everything = list(permutations(nodes, 2))
    others = [each for each in nodes if each != victim]
    match name:
        case "Shatter":
            return everything
        case "Isolate" | "Disconnect":
            return [link for link in everything if victim in link]
        case "Mute":
            return [link for link in everything if link[0] == victim]
        case "Deafen":
            return [link for link in everything if link[1] == victim]
        case "Bridge":
            half = others[: len(others) // 2]
            return [link for link in everything if victim in link and (link[0] in half or link[1] in half)]
        case _:
            return []
