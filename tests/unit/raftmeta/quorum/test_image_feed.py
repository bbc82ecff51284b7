"""The newest image, in order, to listeners and to who waits for an offset."""

from __future__ import annotations

import asyncio

import pytest

from raftlog.errors import ShuttingDown
from raftmeta.image import MetadataImage
from raftmeta.port import Change
from raftmeta.quorum.image_feed import ImageFeed
from tests.support.quorum import run


def publish(feed: ImageFeed, offset: int) -> None:
    feed.publish(MetadataImage(offset=offset, controller_epoch=1), Change(offset, 1, ()))


def test_listeners_hear_every_change_once_even_beside_a_broken_one() -> None:
    feed = ImageFeed()
    heard: list[tuple[int, object]] = []

    def broken(image: MetadataImage, records: object) -> None:
        raise ZeroDivisionError

    feed.subscribe(broken)
    unsubscribe = feed.subscribe(lambda image, records: heard.append((image.offset, records)))
    publish(feed, 3)
    feed.reset(MetadataImage(offset=9, controller_epoch=1))
    unsubscribe()
    publish(feed, 11)
    assert heard == [(3, ()), (9, None)]
    assert feed.image.offset == 11
    assert feed.changes_since(3) is None
    assert [change.offset for change in feed.changes_since(9) or ()] == [11]


def test_going_back_is_a_bug() -> None:
    feed = ImageFeed(MetadataImage(offset=5, controller_epoch=2))
    with pytest.raises(AssertionError):
        publish(feed, 5)
    with pytest.raises(AssertionError):
        feed.reset(MetadataImage(offset=4, controller_epoch=2))
    with pytest.raises(AssertionError):
        feed.publish(MetadataImage(offset=6, controller_epoch=1), Change(6, 1, ()))


def test_who_waits_for_an_offset_goes_on_when_it_is_reached() -> None:
    async def scenario() -> None:
        feed = ImageFeed()
        await feed.reached(0)
        waiting = [asyncio.create_task(feed.reached(offset)) for offset in (7, 3, 5)]
        await asyncio.sleep(0)
        publish(feed, 6)
        await asyncio.sleep(0)
        assert [task.done() for task in waiting] == [False, True, True]
        feed.close(ShuttingDown("stopping"))
        with pytest.raises(ShuttingDown):
            await waiting[0]
        with pytest.raises(ShuttingDown):
            await feed.reached(100)
        await feed.reached(6)

    run(scenario)


def test_a_waiter_that_was_cancelled_is_no_trouble() -> None:
    async def scenario() -> None:
        feed = ImageFeed()
        waiting = asyncio.create_task(feed.reached(3))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)
        publish(feed, 3)
        assert feed.image.offset == 3

    run(scenario)
