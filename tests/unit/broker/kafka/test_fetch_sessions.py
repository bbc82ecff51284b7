"""Incremental fetch sessions (KIP-227): what is named, what is sent, and how many there may be."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from broker.kafka import errors, fetch
from broker.kafka.codec import Fields
from broker.kafka.fetch import FULL_EPOCH, NO_EPOCH, Refusal, Sessions, _Part, _Session
from broker.security.caller import Caller
from raftmeta.image import MetadataImage

NAMES, IDS = 12, 13
TOPIC_ID = b"t" * 16


def request(
    session_id: int = 0,
    epoch: int = FULL_EPOCH,
    parts: tuple[int, ...] = (),
    forgotten: tuple[int, ...] = (),
    at: int = 0,
) -> Fields:
    def named(partitions: list[Any]) -> list[Fields]:
        return [{"topic": "t", "topic_id": TOPIC_ID, "partitions": partitions}] if partitions else []

    return {
        "session_id": session_id,
        "session_epoch": epoch,
        "topics": named(
            [
                {"partition": each, "current_leader_epoch": 1, "fetch_offset": at, "partition_max_bytes": 100}
                for each in parts
            ]
        ),
        "forgotten_topics_data": named(list(forgotten)),
    }


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def begun(sessions: Sessions, parts: tuple[int, ...] = (0, 1), principal: str = "User:a") -> _Session:
    session, _ = sessions.enter(request(parts=parts), NAMES, principal)
    assert session is not None
    return session


def numbers(parts: list[_Part]) -> list[int]:
    return [each.partition for each in parts]


def result(high_watermark: int = 5, *, code: int = 0, records: bytes = b"") -> Fields:
    return {
        "error_code": code,
        "high_watermark": high_watermark,
        "last_stable_offset": high_watermark,
        "log_start_offset": 0,
        "preferred_read_replica": -1,
        "records": [records] if records else [],
    }


@pytest.mark.parametrize("version", [NAMES, IDS])
def test_later_requests_name_only_what_changes(version: int) -> None:
    sessions = Sessions(Clock())
    session, parts = sessions.enter(request(parts=(0, 1, 2)), version, "")
    assert session is not None
    assert numbers(parts) == [0, 1, 2]
    _, parts = sessions.enter(request(session.id, 1), version, "")
    assert numbers(parts) == [0, 1, 2]
    _, parts = sessions.enter(request(session.id, 2, parts=(1, 3), forgotten=(0,), at=7), version, "")
    assert [(each.partition, each.offset) for each in parts] == [(1, 7), (2, 0), (3, 7)]
    assert sessions.cached == 3


@pytest.mark.parametrize(
    ("session_id", "epoch", "version", "principal", "code"),
    [
        (0, 2, NAMES, "User:a", errors.INVALID_FETCH_SESSION_EPOCH),
        (0, 0x7FFFFFFF, NAMES, "User:a", errors.INVALID_FETCH_SESSION_EPOCH),
        (1, 1, NAMES, "User:a", errors.FETCH_SESSION_ID_NOT_FOUND),
        (0, 1, NAMES, "User:b", errors.FETCH_SESSION_ID_NOT_FOUND),
        (0, 1, IDS, "User:a", errors.FETCH_SESSION_TOPIC_ID_ERROR),
    ],
)
def test_a_request_of_another_session_is_refused(
    session_id: int, epoch: int, version: int, principal: str, code: int
) -> None:
    """`session_id` is how far it is from the session's."""
    sessions = Sessions(Clock())
    session = begun(sessions)
    with pytest.raises(Refusal) as refused:
        sessions.enter(request(session.id + session_id, epoch), version, principal)
    assert refused.value.code == code
    _, parts = sessions.enter(request(session.id, 1), NAMES, "User:a")
    assert numbers(parts) == [0, 1]


def test_epochs_begin_again_with_1() -> None:
    sessions = Sessions(Clock())
    session = begun(sessions)
    session.epoch = fetch.MAX_EPOCH
    sessions.enter(request(session.id, fetch.MAX_EPOCH), NAMES, "User:a")
    sessions.enter(request(session.id, 1), NAMES, "User:a")


@pytest.mark.parametrize("epoch", [FULL_EPOCH, NO_EPOCH])
def test_a_full_request_ends_the_session_that_it_names(epoch: int) -> None:
    sessions = Sessions(Clock())
    first = begun(sessions)
    second, parts = sessions.enter(request(first.id, epoch, parts=(4,)), NAMES, "User:a")
    assert numbers(parts) == [4]
    assert (second is None) == (epoch == NO_EPOCH)
    with pytest.raises(Refusal):
        sessions.enter(request(first.id, 1), NAMES, "User:a")
    assert (len(sessions), sessions.cached) == ((0, 0) if second is None else (1, 1))


def test_another_principals_session_is_not_ended() -> None:
    sessions = Sessions(Clock())
    session = begun(sessions)
    sessions.enter(request(session.id, NO_EPOCH), NAMES, "User:b")
    sessions.enter(request(session.id, 1), NAMES, "User:a")


def test_sessions_are_bounded_and_the_longest_unused_makes_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_SESSIONS", 3)
    clock = Clock()
    sessions = Sessions(clock)
    old = [begun(sessions) for _ in range(3)]
    clock.now_s = fetch.EVICTION_S - 1
    sessions.enter(request(old[0].id, 1), NAMES, "User:a")
    none, parts = sessions.enter(request(parts=(0,)), NAMES, "User:a")
    assert none is None, "no session must be made, as none has been unused long enough to give way"
    assert numbers(parts) == [0]
    clock.now_s = fetch.EVICTION_S
    begun(sessions)
    with pytest.raises(Refusal):
        sessions.enter(request(old[1].id, 1), NAMES, "User:a")
    sessions.enter(request(old[0].id, 2), NAMES, "User:a")
    assert len(sessions) == 3


def test_cached_partitions_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "MAX_CACHED", 5)
    sessions = Sessions(Clock())
    session = begun(sessions, (0, 1, 2))
    assert sessions.enter(request(parts=(0, 1, 2)), NAMES, "User:a")[0] is None
    sessions.enter(request(session.id, 1, parts=(3, 4)), NAMES, "User:a")
    with pytest.raises(Refusal) as refused:
        sessions.enter(request(session.id, 2, parts=(5,)), NAMES, "User:a")
    assert refused.value.code == errors.FETCH_SESSION_ID_NOT_FOUND
    assert (len(sessions), sessions.cached) == (0, 0)


def test_only_news_are_sent() -> None:
    _, (part,) = Sessions(Clock()).enter(request(parts=(0,)), NAMES, "")
    assert part.is_news(result(5))
    assert not part.is_news(result(5))
    assert part.is_news(result(5, records=b"r"))
    assert part.is_news(result(6))
    assert part.is_news(result(code=errors.NOT_LEADER_OR_FOLLOWER))
    assert part.is_news(result(code=errors.NOT_LEADER_OR_FOLLOWER))
    assert part.is_news(result(6)), "the same result must be sent again after an error"
    assert part.is_news({**result(6), "preferred_read_replica": 2})


def test_a_client_over_its_quota_keeps_its_session() -> None:
    """KIP-219: an empty response; the session's epoch moves on as the client's does, and no session is begun."""
    nothing = cast(Any, SimpleNamespace(lease=None, counters=None))
    served = fetch.Fetch(nothing, MetadataImage, nothing, nothing)
    who = Caller("User:a")
    assert served.held(request(parts=(0,)), NAMES, who) == {"session_id": 0, "responses": []}
    assert len(served.sessions) == 0
    session = begun(served.sessions)
    assert served.held(request(session.id, 1, parts=(2,)), NAMES, who) == {"session_id": session.id, "responses": []}
    _, parts = served.sessions.enter(request(session.id, 2), NAMES, "User:a")
    assert numbers(parts) == [0, 1, 2]
    assert served.held(request(session.id, 2), NAMES, who)["error_code"] == errors.INVALID_FETCH_SESSION_EPOCH
    other = served.held(request(session.id, 3), NAMES, Caller("User:b"))
    assert other["error_code"] == errors.FETCH_SESSION_ID_NOT_FOUND
