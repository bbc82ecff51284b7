"""Streams share the turns of the event loop: a budget for each, and users one after another."""

from __future__ import annotations

import asyncio

from broker.turns import SharedTurns


async def piece(turns: SharedTurns, name: str, cost: int, done: list[str]) -> None:
    if not turns.take(cost):
        await turns.wait(name, cost)
    done.append(name)


async def begun_by_turn(turns: SharedTurns, pieces: list[asyncio.Task[None]], done: list[str]) -> list[str]:
    """Return what began in each turn of the event loop, until all is done."""
    seen: list[str] = []
    async with asyncio.timeout(60):
        while not all(each.done() for each in pieces):
            before = len(done)
            await asyncio.sleep(0)
            if done[before:]:
                seen.append("".join(done[before:]))
    return seen


async def test_a_turn_begins_what_its_budget_holds() -> None:
    turns, done = SharedTurns(10), list[str]()
    pieces = [asyncio.create_task(piece(turns, "a", 4, done)) for _ in range(9)]
    assert await begun_by_turn(turns, pieces, done) == ["aaa", "aaa", "aaa"]


async def test_users_take_turns_whatever_they_have_waiting() -> None:
    turns, done = SharedTurns(10), list[str]()
    pieces = [asyncio.create_task(piece(turns, "a", 10, done)) for _ in range(5)]
    pieces += [asyncio.create_task(piece(turns, name, 10, done)) for name in "bc"]
    assert await begun_by_turn(turns, pieces, done) == ["a", "a", "b", "c", "a", "a", "a"]


async def test_small_pieces_of_many_streams_share_a_turn() -> None:
    turns, done = SharedTurns(10), list[str]()
    pieces = [asyncio.create_task(piece(turns, "a", 100, done))]
    pieces += [asyncio.create_task(piece(turns, f"{number}", 1, done)) for number in range(8)]
    assert await begun_by_turn(turns, pieces, done) == ["a", "01234567"]


async def test_a_stream_that_ends_leaves_its_turn_to_the_next() -> None:
    turns, done = SharedTurns(1), list[str]()
    pieces = [asyncio.create_task(piece(turns, "a", 1, done)) for _ in range(4)]
    await asyncio.sleep(0)
    for each in pieces[1:3]:
        each.cancel()
    assert await begun_by_turn(turns, pieces, done) == ["a"]
    last = asyncio.create_task(piece(turns, "a", 1, done))
    assert await begun_by_turn(turns, [last], done) == ["a"]


async def test_what_comes_in_one_turn_and_is_no_more_than_half_of_the_budget_never_waits() -> None:
    """Producers that a wait has parted would stay so, and each message would have fewer of them."""
    turns = SharedTurns(100)
    for _ in range(50):
        assert all(turns.take(10) for _ in range(5))
        await asyncio.sleep(0)
