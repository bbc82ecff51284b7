"""Deliveries whose time is up when a test says so."""

from __future__ import annotations

from raftlog import Delivery, Producer


def expire(producer: Producer, delivery: Delivery) -> None:
    """Let `delivery.timeout.ms` be over for a delivery before which the producer has no other one."""
    with producer._lock:
        delivery._batch.deadline_ms = 0.0
