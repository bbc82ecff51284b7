"""Loads made even by handing things on from one holder to another: directly, or over others where that is the only way.

A thing may go from `u` to `v` where `best(u, v)` names one. Every step lowers the sum of the squares of the loads, so
there is an end. Where nothing but who has a thing already says whether it may go, no chain of steps leads then from a
holder to one that has two less, and that sum is the least there is (it is a flow whose cost is convex): loads are
within one wherever that can be. Steps go from who has most, first to who has less than the mean: each takes away from
what one has above it and adds to what another lacks, so that no fewer would do where they are direct.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Protocol, TypeVar

Thing = TypeVar("Thing")


class Best(Protocol[Thing]):
    """Which thing of `from_` had best go to `to`, none of `besides`; None: none may."""

    def __call__(self, from_: int, to: int, besides: Collection[Thing] = ()) -> Thing | None:
        """Return it."""


def even_out(load: Mapping[int, int], best: Best[Thing], hand_on: Callable[[Thing, int, int], None]) -> None:
    """Hand things on until loads are even. `load`: by holder, kept up to date by `hand_on(thing, from_, to)`."""
    stuck: set[int] = set()
    while True:
        steps = _next_steps(load, best, stuck)
        if not steps:
            return
        for thing, from_, to in steps:
            hand_on(thing, from_, to)


def _next_steps(load: Mapping[int, int], best: Best[Thing], stuck: set[int]) -> list[tuple[Thing, int, int]]:
    """Return the steps that take one thing from a holder with most to one with little; none: all is even.

    `stuck` remembers from whom nothing led anywhere: whoever can be reached from there is no better off, so that what
    others hand on among themselves opens no way either.
    """
    for from_ in sorted(load.keys() - stuck, key=lambda holder: (-load[holder], holder)):
        if steps := _steps_from(load, best, from_):
            return steps
        stuck.add(from_)
    return []


def _steps_from(load: Mapping[int, int], best: Best[Thing], from_: int) -> list[tuple[Thing, int, int]]:
    less = [holder for holder in load if load[holder] <= load[from_] - 2]
    if not less:
        return []
    mean = sum(load.values()) / len(load)
    for to in sorted(less, key=lambda holder: (load[holder] >= mean, load[holder], holder)):
        thing = best(from_, to)
        if thing is not None:
            return [(thing, from_, to)]
    return _chain_from(load, best, from_)


def _chain_from(load: Mapping[int, int], best: Best[Thing], from_: int) -> list[tuple[Thing, int, int]]:
    """Return a shortest chain, each thing in it once: so no step of it stands in another's way."""
    chains: dict[int, list[tuple[Thing, int, int]]] = {from_: []}
    front = [from_]
    while front:
        following = []
        for holder in front:
            besides = [thing for thing, _, _ in chains[holder]]
            for to in sorted(load.keys() - chains.keys(), key=lambda each: (load[each], each)):
                thing = best(holder, to, besides)
                if thing is None:
                    continue
                chains[to] = [*chains[holder], (thing, holder, to)]
                if load[to] <= load[from_] - 2:
                    return chains[to]
                following.append(to)
        front = following
    return []


def even_out_amounts(
    load: Mapping[int, int],
    slack: int,
    best: Callable[[int, int, int], Thing | None],
    hand_on: Callable[[Thing, int, int], None],
) -> None:
    """The same for things of many sizes: until loads are within `slack`, or nothing brings two of them closer.

    `best(from_, to, gap)` names a thing smaller than the gap between the two, or None; that it names each thing of a
    holder a limited number of times is what bounds the steps.
    """
    while True:
        step = _closer(load, slack, best)
        if step is None:
            return
        hand_on(*step)


def _closer(
    load: Mapping[int, int], slack: int, best: Callable[[int, int, int], Thing | None]
) -> tuple[Thing, int, int] | None:
    upwards = sorted(load, key=lambda holder: (load[holder], holder))
    for from_ in reversed(upwards):
        for to in upwards:
            gap = load[from_] - load[to]
            if gap <= slack:
                break
            thing = best(from_, to, gap)
            if thing is not None:
                return thing, from_, to
    return None
