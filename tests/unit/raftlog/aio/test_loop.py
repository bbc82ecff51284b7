"""A client of `raftlog.aio` and the event loop that it belongs to."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from raftlog import aio
from raftlog.errors import ClosedError

UNREACHABLE = "127.0.0.1:1"


async def begin_an_engine(client: Any) -> None:
    assert client._engine is not None


@pytest.mark.parametrize("make", [aio.Producer, aio.Consumer, aio.Admin])
@pytest.mark.parametrize("use", [begin_an_engine, lambda client: client.close()], ids=["a call", "close"])
def test_a_client_in_a_second_event_loop_says_where_it_belongs(
    make: Callable[..., Any], use: Callable[[Any], Any]
) -> None:
    """The first loop has ended with the client's connections: asyncio itself would say that a loop is closed."""
    client = make(UNREACHABLE)
    asyncio.run(begin_an_engine(client))
    with pytest.raises(ClosedError, match="first used, and which has ended; make and close one in each event loop"):
        asyncio.run(use(client))
    assert "127.0.0.1:1" in repr(client), "repr must work in every loop, and in none"


def test_a_client_without_an_engine_may_be_used_and_closed_in_any_event_loop() -> None:
    client = aio.Admin(UNREACHABLE)
    assert "not used yet" in repr(client)
    asyncio.run(client.close())
    with pytest.raises(ClosedError, match="the admin is closed"):
        asyncio.run(begin_an_engine(client))


@pytest.mark.parametrize("make", [aio.Producer, aio.Consumer, aio.Admin])
def test_a_client_that_is_closed_may_be_closed_again_in_another_event_loop(make: Callable[..., Any]) -> None:
    client = make(UNREACHABLE)

    async def use_and_close() -> None:
        await begin_an_engine(client)
        await client.close()

    asyncio.run(use_and_close())
    asyncio.run(client.close())
    assert "closed" in repr(client)


def test_state_may_be_read_where_no_event_loop_runs() -> None:
    consumer: aio.Consumer[Any, Any] = aio.Consumer(UNREACHABLE)
    asyncio.run(begin_an_engine(consumer))
    assert not consumer.assignment()
