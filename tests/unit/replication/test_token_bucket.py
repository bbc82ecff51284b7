"""The throttle of replication traffic."""

from __future__ import annotations

import pytest

from replication.token_bucket import TokenBucket


def test_without_a_rate_everything_passes() -> None:
    bucket = TokenBucket()
    bucket.take(1 << 40, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0


def test_the_rate_holds_over_time_whatever_the_pieces() -> None:
    bucket, now_ms, sent = TokenBucket(1_000_000), 0.0, 0
    while now_ms < 60_000:
        now_ms = max(now_ms, bucket.ready_at_ms(now_ms))
        bucket.take(70_000, now_ms)
        sent += 70_000
    assert sent == pytest.approx(60_000_000, rel=0.01)


def test_a_piece_larger_than_the_burst_passes_and_the_next_one_waits_for_the_debt() -> None:
    bucket = TokenBucket(1_000)
    assert bucket.ready_at_ms(0.0) == 0.0
    bucket.take(10_200, 0.0)
    assert bucket.ready_at_ms(0.0) == pytest.approx(10_000, abs=2)
    assert bucket.ready_at_ms(5_000.0) == pytest.approx(10_000, abs=2)
    assert bucket.ready_at_ms(10_002.0) == 10_002.0


def test_a_pause_saves_up_no_more_than_the_burst() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(1, 0.0)
    bucket.take(300, 3_600_000.0)
    assert bucket.ready_at_ms(3_600_000.0) == pytest.approx(3_600_101, abs=2)


def test_a_change_of_the_rate_keeps_a_debt_and_no_limit_forgives_it() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(10_200, 0.0)
    bucket.set_rate(10_000, 0.0)
    assert bucket.ready_at_ms(0.0) == pytest.approx(1_000, abs=2)
    bucket.set_rate(None, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0
    bucket.set_rate(500, 0.0)
    assert bucket.ready_at_ms(0.0) == 0.0


def test_the_time_in_which_nothing_might_flow_is_counted() -> None:
    bucket = TokenBucket(1_000)
    bucket.take(1_200, 0.0)  # the burst is 200
    assert bucket.throttled_ms == 0
    bucket.ready_at_ms(400.0)
    assert bucket.throttled_ms == pytest.approx(400)
    bucket.ready_at_ms(9_000.0)
    assert bucket.throttled_ms == pytest.approx(1_000, abs=2), "no longer than there was a debt"
    bucket.ready_at_ms(20_000.0)
    assert bucket.throttled_ms == pytest.approx(1_000, abs=2)
