"""Which quota a client has, what it is charged, and for how long it is held (KIP-13, KIP-257, KIP-599)."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from broker.quotas import client_quotas
from broker.quotas.client_quotas import MAX_BUCKETS, ClientQuotas
from raftmeta.quotas import (
    CONTROLLER_MUTATION_RATE,
    DEFAULT,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    Limit,
    QuotaEntity,
    limit_of,
    limit_of_ip,
)
from tests.support.fresh import examples

WINDOW_MS = 11_000.0
ALICE = "User:alice"


def quotas(values: dict[QuotaEntity, float], key: str = PRODUCER_BYTE_RATE) -> ClientQuotas:
    made = ClientQuotas(WINDOW_MS)
    made.follow({entity: {key: value} for entity, value in values.items()}, 0.0)
    return made


LEVELS = [
    (QuotaEntity("alice", "app"), QuotaEntity("alice", "app")),
    (QuotaEntity("alice", DEFAULT), QuotaEntity("alice", "app")),
    (QuotaEntity("alice"), QuotaEntity("alice")),
    (QuotaEntity(DEFAULT, "app"), QuotaEntity("alice", "app")),
    (QuotaEntity(DEFAULT, DEFAULT), QuotaEntity("alice", "app")),
    (QuotaEntity(DEFAULT), QuotaEntity("alice")),
    (QuotaEntity(client_id="app"), QuotaEntity(client_id="app")),
    (QuotaEntity(client_id=DEFAULT), QuotaEntity(client_id="app")),
]
"""Entities in the order in which they count (KIP-55), with the clients that share the rate."""


@pytest.mark.parametrize("level", range(8))
def test_the_first_level_that_has_the_key_gives_the_quota(level: int) -> None:
    """Drops one level after the other, from above: the next one counts."""
    present = {entity: {PRODUCER_BYTE_RATE: 100.0 + at} for at, (entity, _) in enumerate(LEVELS) if at >= level}
    others = {
        QuotaEntity("bob", "app"): {PRODUCER_BYTE_RATE: 1.0},
        QuotaEntity("alice", "app"): {"consumer_byte_rate": 2.0},
    }
    assert limit_of({**others, **present}, PRODUCER_BYTE_RATE, "alice", "app") == Limit(100.0 + level, LEVELS[level][1])


def test_without_a_quota_nothing_is_held() -> None:
    assert limit_of({}, PRODUCER_BYTE_RATE, "alice", "app") is None
    made = quotas({QuotaEntity("bob"): 1.0})
    assert made.charge(ALICE, "app", PRODUCER_BYTE_RATE, 1e12, 0.0) == 0
    assert made.find(ALICE, "app", PRODUCER_BYTE_RATE) is None


def test_addresses_have_their_own_quota_or_the_default() -> None:
    key = "connection_creation_rate"
    both = {QuotaEntity(ip=DEFAULT): {key: 5.0}, QuotaEntity(ip="10.0.0.1"): {key: 50.0}}
    assert [limit_of_ip(both, ip) for ip in ("10.0.0.1", "10.0.0.2")] == [50.0, 5.0]
    assert limit_of_ip({}, "10.0.0.1") is None


def test_the_delay_is_that_of_kafkas_formula() -> None:
    """KIP-13: "the delay is (O - T)/T * W", with O bytes/s observed over W seconds and the quota T."""
    rate, used = 1_000.0, 30_000.0
    made = quotas({QuotaEntity("alice"): rate})
    window_s = WINDOW_MS / 1_000
    observed = used / window_s
    delay_ms = made.charge(ALICE, "", PRODUCER_BYTE_RATE, used, 0.0)
    assert delay_ms == pytest.approx((observed - rate) / rate * WINDOW_MS, abs=1.1)  # the bucket holds one byte then
    assert made.delay_ms(ALICE, "", PRODUCER_BYTE_RATE, delay_ms) == 0


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("rate", [10_000.0, 1_000_000.0, 123_456_789.0])
def test_the_rate_of_a_client_that_obeys_is_the_quota_within_a_percent(rate: float, seed: int) -> None:
    """Requests of 1 byte to 4 s of the quota; measured from the end of the first burst, over 1 000 s."""
    drawn = random.Random(seed)
    made = quotas({QuotaEntity("alice"): rate})
    now_ms = made.charge(ALICE, "", PRODUCER_BYTE_RATE, rate * WINDOW_MS / 1_000, 0.0)
    begun_ms, sent = now_ms, 0.0
    while now_ms < begun_ms + 1_000_000:
        size = drawn.uniform(1, 4 * rate)
        sent += size
        now_ms += made.charge(ALICE, "", PRODUCER_BYTE_RATE, size, now_ms)
    assert sent / (now_ms - begun_ms) * 1_000 == pytest.approx(rate, rel=0.01)


def test_clients_of_one_user_share_its_quota_and_other_users_do_not() -> None:
    made = quotas({QuotaEntity(DEFAULT): 1_000.0})
    for client_id in ("one", "two"):
        made.charge(ALICE, client_id, PRODUCER_BYTE_RATE, 11_000, 0.0)
    assert made.delay_ms(ALICE, "three", PRODUCER_BYTE_RATE, 0.0) == pytest.approx(11_001, abs=1)
    assert made.delay_ms("User:bob", "one", PRODUCER_BYTE_RATE, 0.0) == 0
    assert [(each.scope, each.used) for each in made.usage()] == [
        (QuotaEntity("alice"), 22_000),
        (QuotaEntity("bob"), 0),
    ]


def test_a_node_has_no_quota() -> None:
    made = quotas({QuotaEntity(DEFAULT): 1.0, QuotaEntity(client_id=DEFAULT): 1.0})
    assert made.charge("Node:1", "x", PRODUCER_BYTE_RATE, 1e9, 0.0) == 0


def test_a_changed_quota_counts_at_once_and_the_debt_stays() -> None:
    made = quotas({QuotaEntity("alice"): 1_000.0})
    assert made.charge(ALICE, "", PRODUCER_BYTE_RATE, 31_000, 0.0) == pytest.approx(20_001)
    version = made.version
    made.follow({QuotaEntity("alice"): {PRODUCER_BYTE_RATE: 10_000.0}}, 0.0)
    assert made.version > version
    assert made.delay_ms(ALICE, "", PRODUCER_BYTE_RATE, 0.0) == pytest.approx(2_000, abs=1)
    made.follow({QuotaEntity("alice", "app"): {PRODUCER_BYTE_RATE: 10_000.0}}, 0.0)  # of another scope
    assert made.delay_ms(ALICE, "", PRODUCER_BYTE_RATE, 0.0) == 0
    assert made.usage() == []


def test_a_change_may_exceed_the_quota_and_the_next_is_refused_until_it_is_paid() -> None:
    """KIP-599: a request is accepted while tokens are left, however many it takes; then none is."""
    made = quotas({QuotaEntity("alice"): 2.0}, CONTROLLER_MUTATION_RATE)
    assert made.admit(ALICE, "", CONTROLLER_MUTATION_RATE, 122, 0.0) == 0  # 22 tokens
    refused_ms = made.admit(ALICE, "", CONTROLLER_MUTATION_RATE, 1, 0.0)
    assert refused_ms == pytest.approx(50_500)
    assert made.admit(ALICE, "", CONTROLLER_MUTATION_RATE, 1, refused_ms - 600) == pytest.approx(600)
    assert made.admit(ALICE, "", CONTROLLER_MUTATION_RATE, 1, refused_ms) == 0


def test_request_percentage_is_time_of_the_event_loop() -> None:
    made = quotas({QuotaEntity("alice"): 1.0}, REQUEST_PERCENTAGE)
    assert made.charge(ALICE, "", REQUEST_PERCENTAGE, 109, 0.0) == 0  # of 110 ms in 11 s
    assert made.charge(ALICE, "", REQUEST_PERCENTAGE, 11, 0.0) == pytest.approx(1_100)


def test_the_rates_that_are_followed_are_bounded() -> None:
    made = quotas({QuotaEntity(client_id=DEFAULT): 1.0})
    for number in range(MAX_BUCKETS + 10):
        made.charge(ALICE, f"client {number}", PRODUCER_BYTE_RATE, 1_000, 0.0)
    assert MAX_BUCKETS * 0.9 < len(made.usage()) <= MAX_BUCKETS
    assert made.delay_ms(ALICE, f"client {MAX_BUCKETS + 9}", PRODUCER_BYTE_RATE, 0.0) > 0
    assert made.delay_ms(ALICE, "client 0", PRODUCER_BYTE_RATE, 0.0) == 0, (
        "the client that was unused longest must have been forgotten"
    )


def test_a_change_of_one_users_quota_looks_at_that_users_rates_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """To look at all of 9,000 rates held up the event loop for 70 ms, at each change."""
    set_quotas = {QuotaEntity(f"user-{number}"): {PRODUCER_BYTE_RATE: 1_000.0} for number in range(1_000)}
    made = ClientQuotas(WINDOW_MS)
    made.follow(set_quotas, 0.0)
    for number in range(1_000):
        made.charge(f"User:user-{number}", "", PRODUCER_BYTE_RATE, 31_000, 0.0)
    looked: list[str] = []

    def counted(quotas: Any, key: str, user: str, client_id: str) -> Limit | None:
        looked.append(user)
        return limit_of(quotas, key, user, client_id)

    monkeypatch.setattr(client_quotas, "limit_of", counted)
    made.follow({**set_quotas, QuotaEntity("user-7"): {PRODUCER_BYTE_RATE: 10_000.0}}, 0.0)
    assert looked == ["user-7"]
    assert made.delay_ms("User:user-7", "", PRODUCER_BYTE_RATE, 0.0) == pytest.approx(2_000, abs=1)


_ENTITIES = st.builds(QuotaEntity, st.sampled_from([None, DEFAULT, "a", "b"]), st.sampled_from([None, DEFAULT, "x"]))


@given(
    st.lists(
        st.dictionaries(
            _ENTITIES,
            st.dictionaries(
                st.sampled_from([PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE]), st.sampled_from([1.0, 2.0]), min_size=1
            ),
        ),
        min_size=1,
        max_size=4,
    )
)
@settings(max_examples=examples(1))
def test_after_any_changes_every_rate_is_that_of_the_quotas(steps: list[dict[QuotaEntity, dict[str, float]]]) -> None:
    made = ClientQuotas(WINDOW_MS)
    for given_quotas in steps:
        made.follow(given_quotas, 0.0)
        for (key, scope), bucket in made._buckets.items():
            assert limit_of(given_quotas, key, scope.user or "", scope.client_id or "") == Limit(bucket.rate, scope)
        for user in ("a", "b", "c"):
            for client_id in ("x", "y"):
                for key in (PRODUCER_BYTE_RATE, REQUEST_PERCENTAGE):
                    limit = limit_of(given_quotas, key, user, client_id)
                    bucket_now = made.find(f"User:{user}", client_id, key)
                    assert (None if bucket_now is None else bucket_now.rate) == (None if limit is None else limit.rate)
