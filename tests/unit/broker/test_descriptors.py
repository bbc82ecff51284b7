"""How a broker divides its file descriptors."""

from __future__ import annotations

import logging
import resource

import pytest

from broker.descriptors import MAX_DESCRIPTORS, Descriptors, descriptors, divided, warn_of_few_descriptors


@pytest.mark.parametrize("limit", [64, 256, 1_024, 4_096, 65_536, 100_000, MAX_DESCRIPTORS, 1 << 62])
def test_the_shares_leave_an_eighth_for_all_other_uses_and_for_open_segments(limit: int) -> None:
    found = divided(limit)
    known = min(limit, MAX_DESCRIPTORS)
    assert found.connections == known // 2
    assert min(found) > 0
    assert known - found.connections - found.replicas >= known // 8
    assert known - sum(found) >= known // 16


def test_the_limit_of_the_manual_is_enough_for_the_default() -> None:
    assert divided(100_000).replicas > 20_000
    assert divided(4_096) == Descriptors(2_048, 1_536, 256)


def test_the_limit_is_raised_as_far_as_the_system_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    raised: list[tuple[int, int]] = []
    limits = {"now": (1_024, 4_096)}
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits["now"])
    monkeypatch.setattr(resource, "setrlimit", lambda _, wanted: raised.append(wanted))
    assert descriptors() == divided(4_096)
    assert raised == [(4_096, 4_096)]
    limits["now"] = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    assert descriptors() == divided(MAX_DESCRIPTORS)

    def refuse(*_: object) -> None:
        raise OSError

    monkeypatch.setattr(resource, "setrlimit", refuse)
    limits["now"] = (1_024, 4_096)
    assert descriptors() == divided(1_024)


def test_too_few_are_told_with_what_to_do(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        warn_of_few_descriptors(divided(4_096), 1_536)
        assert not caplog.records
        warn_of_few_descriptors(divided(4_096), 20_000)
    [told] = caplog.messages
    assert "(ulimit -n) allows this broker 1536 replicas" in told
    assert "raise the limit to 53334 on all brokers" in told
    assert divided(53_334).replicas >= 20_000
