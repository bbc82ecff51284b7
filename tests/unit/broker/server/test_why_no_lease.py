"""A broker gives its lease up as soon as the image contradicts it, whatever the controller granted before."""

from __future__ import annotations

from broker.server.broker_role import why_no_lease
from tests.support.metadata import accept, broker_epoch, cluster, fence, register


def test_nothing_speaks_against_a_live_broker_of_this_epoch() -> None:
    image = cluster(2)
    assert why_no_lease(image, 1, broker_epoch(image, 1)) == ""


def test_a_fenced_an_unknown_and_a_replaced_one_have_none() -> None:
    image = cluster(2)
    epoch = broker_epoch(image, 1)
    fenced, _ = accept(image, fence(1, epoch))
    assert "fenced" in why_no_lease(fenced, 1, epoch)
    assert "unregistered" in why_no_lease(image, 9, 5)
    replaced, _ = accept(fenced, register(1, incarnation=9))
    assert "another process" in why_no_lease(replaced, 1, epoch)
