"""What connections share: each user's part, the order of those that wait, and holders that make no progress."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from broker.quotas import room as module
from broker.quotas.room import STEP_BYTES, Hold, Room
from tests.support.loop_turns import calls_in_a_turn

STALL_S = 4.0


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


async def test_one_user_gets_half_and_others_always_find_some() -> None:
    room = Room(120)
    greedy = [asyncio.ensure_future(room.take("a", 10)) for _ in range(12)]
    await settled()
    assert room.held("a") == 60
    await asyncio.gather(*(room.take("b", 10) for _ in range(3)))
    waits = asyncio.ensure_future(room.take("b", 10))
    await settled()
    assert not waits.done()
    assert (await room.take("c", 30)).size == 30
    for each in greedy:
        each.cancel()
    waits.cancel()


async def test_what_is_given_back_goes_to_those_that_wait_in_their_order() -> None:
    room = Room(40)
    first = await room.take("a", 20)
    second, third = (asyncio.ensure_future(room.take("a", size)) for size in (20, 5))
    await settled()
    assert not second.done()
    assert not third.done(), "a smaller one does not overtake"
    first.give()
    await settled()
    assert second.done()
    assert not third.done()
    (await second).give()
    assert (await third).size == 5


async def test_a_user_that_holds_nothing_comes_before_those_that_hold_some() -> None:
    """Else many that come and go would leave it no room for a large one."""
    room = Room(100)
    held = {name: await room.take(name, 30) for name in "ab"}
    large = asyncio.ensure_future(room.take("c", 60))
    small = asyncio.ensure_future(room.take("a", 1))
    await settled()
    assert not large.done()
    assert not small.done()
    held["b"].give()
    await settled()
    assert large.done()
    assert not small.done()


async def test_a_part_is_enough_where_the_caller_says_so() -> None:
    room = Room(100)
    assert (await room.take("a", 40, least=10)).size == 40
    assert (await room.take("a", 40, least=10)).size == 10
    assert (await room.take("b", 70, least=10)).size == 50


async def test_a_size_beyond_the_total_takes_all() -> None:
    room = Room(100)
    assert (await room.take("a", 1_000)).size == 100


async def test_a_hold_may_grow_beyond_what_is_free() -> None:
    """What it stands for is there already."""
    room = Room(100)
    hold = await room.take("a", 10)
    hold.resize(150)
    waits = asyncio.ensure_future(room.take("b", 1))
    await settled()
    assert room.free == -50
    assert not waits.done()
    hold.resize(20)
    assert (await waits).size == 1
    hold.give()
    hold.give()
    assert (room.free, room.held("a")) == (99, 0)


async def test_one_that_no_longer_waits_holds_nothing() -> None:
    room = Room(10)
    hold = await room.take("a", 10)
    waits, after = (asyncio.ensure_future(room.take(name, 10)) for name in "bc")
    await settled()
    waits.cancel()
    await settled()
    hold.give()
    assert (await after).name == "c"
    late = asyncio.ensure_future(room.take("d", 10))
    await settled()
    (await after).give()
    late.cancel()  # in the turn in which it is granted
    await settled()
    assert (room.free, room.waiting) == (10, 0)


async def test_one_that_is_granted_what_it_has_just_stopped_waiting_for() -> None:
    room = Room(10)
    hold = await room.take("a", 10)
    waits, after = (asyncio.ensure_future(room.take("b", 5)) for _ in range(2))
    await settled()
    waits.cancel()
    hold.give()  # before the one that waited has had its turn
    assert (await after).size == 5
    assert (room.free, room.waiting) == (5, 0)


async def test_what_thousands_of_connections_of_one_user_wait_for_costs_others_little() -> None:
    room = Room(100)
    greedy = [asyncio.ensure_future(room.take("a", 30)) for _ in range(3_000)]
    await settled()
    assert room.held("a") == 30

    async def honest() -> None:
        for _ in range(10):
            (await room.take("b", 10)).give()

    _, most = await calls_in_a_turn(honest())
    assert most < 1_000
    for each in greedy:
        each.cancel()
    await asyncio.gather(*greedy, return_exceptions=True)
    assert (room.free, room.waiting) == (70, 0)


def watched(hold: Hold, moved: list[int], ended: list[Hold], stall_s: float = STALL_S) -> None:
    hold.watch(lambda: moved[0], lambda: ended.append(hold), stall_s)


async def test_a_holder_whose_client_moves_little_has_to_end() -> None:
    room, moved, ended = Room(100), [0], list[Hold]()
    hold = await room.take("a", 10)
    now_s = room.now_s()
    hold.look(now_s + 10 * STALL_S)  # not watched: its client need not do anything
    watched(hold, moved, ended)
    for _ in range(3):
        now_s += STALL_S / 2
        moved[0] += STEP_BYTES
        hold.look(now_s)
    moved[0] += STEP_BYTES - 1
    hold.look(now_s + STALL_S - 0.1)
    assert ended == []
    hold.look(now_s + STALL_S)
    hold.look(now_s + 2 * STALL_S)
    assert ended == [hold]


async def test_holders_are_looked_at_while_others_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.001)
    room, ended = Room(10), list[Hold]()
    hold = await room.take("a", 10)
    watched(hold, [0], ended, stall_s=0.0)
    await asyncio.sleep(0.01)
    assert ended == [], "no other waits"
    waits = asyncio.ensure_future(room.take("b", 10))
    while not ended:  # noqa: ASYNC110 # it is a list
        await asyncio.sleep(0.001)
    hold.give()
    assert (await waits).size == 10


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 60), st.booleans()), max_size=40))
def test_no_more_than_the_total_is_held_and_all_are_served_in_the_end(steps: list[tuple[str, int, bool]]) -> None:
    async def whole() -> None:
        room = Room(100)
        taking: list[asyncio.Task[Hold]] = []
        for name, size, gives in steps:
            done = [each for each in taking if each.done()]
            if gives and done:
                taking.remove(done[0])
                done[0].result().give()
            else:
                taking.append(asyncio.ensure_future(room.take(name, size)))
            await settled()
            held = sum(each.result().size for each in taking if each.done())
            assert (room.free, held) == (100 - held, sum(map(room.held, "abc")))
            assert room.free >= 0
        while taking:
            await settled()
            done = [each for each in taking if each.done()]
            assert done, "none waits for ever"
            taking.remove(done[0])
            done[0].result().give()
        assert room.free == 100

    asyncio.run(whole())
