"""What probes are answered, phase by phase."""

from __future__ import annotations

from broker.observability.health import Health


class Clock:
    def __init__(self) -> None:
        self.ms = 1_000.0

    def now_ms(self) -> int:
        return 0

    def monotonic_ms(self) -> float:
        return self.ms


def test_a_node_is_alive_while_its_loop_turns() -> None:
    clock = Clock()
    health = Health(clock, liveness_timeout_ms=10_000)
    clock.ms += 10_000
    assert health.live() == (200, {"live": True, "event_loop_last_turned_ms_ago": 10_000})
    clock.ms += 1
    assert health.live() == (503, {"live": False, "event_loop_last_turned_ms_ago": 10_001})
    health.beat()
    assert health.live()[0] == 200


def test_recovery_is_no_reason_to_kill_and_shows_how_far_it_is() -> None:
    health = Health(Clock(), 10_000)
    assert health.startup() == (503, {"started": False, "phase": "starting"})
    health.recovering(3, 40)
    assert health.startup() == (503, {"started": False, "phase": "recovering", "recovered": 3, "of": 40})
    assert health.ready() == (503, {"ready": False, "reason": "the node is recovering"})
    assert health.live()[0] == 200
    health.joining()
    assert health.ready()[1]["reason"] == "the node is joining"


def test_a_node_that_serves_is_ready_unless_something_keeps_it() -> None:
    health = Health(Clock(), 10_000)
    why = ""
    health.why_not = lambda: why
    health.serving()
    assert health.startup()[0] == 200
    assert health.ready() == (200, {"ready": True})
    why = "no lease: the controller is away"
    assert health.ready() == (503, {"ready": False, "reason": "no lease: the controller is away"})
    assert health.startup()[0] == 200, "once started, always started"
    why = ""
    health.stopping()
    assert health.ready() == (503, {"ready": False, "reason": "the node is stopping"})
