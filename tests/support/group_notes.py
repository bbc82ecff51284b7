"""Turns what members of a group have noted (`group_member.py`) into spans and commits for `group_checker`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.group_checker import Commit, Given, Span

Event = dict[str, Any]


@dataclass
class Noted:
    """The notes of one process."""

    spans: list[Span] = field(default_factory=list)
    commits: list[Commit] = field(default_factory=list)
    strays: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)
    broken: str | None = None
    left: bool = False
    processed: int = 0


def read_events(path: Path) -> list[Event]:
    """Return the events of a file, without a last line that was not finished."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def noted(events: Iterable[Event], name: str) -> Noted:
    """Follow the events of one process.

    The epoch that a member has after a poll counts for what it owns only once its next poll has not taken that away: it
    may be the epoch of a new session, of which the application has not been told yet.
    """
    found = Noted()
    owned: dict[int, Span] = {}
    after_poll: tuple[int, dict[int, Span]] = -1, {}
    for event in events:
        match event["event"]:
            case "assigned":
                member, instance = f"{name}/{event['member'][:8]}", event["instance"]
                for partition in event["partitions"]:
                    if partition in owned:
                        found.strays.append(f"{member} was given {partition} twice")
                    owned[partition] = Span(
                        member, partition, event["epoch"], event["epoch"], event["at"], [], instance
                    )
                    found.spans.append(owned[partition])
            case "revoked" | "lost":
                for partition in event["partitions"]:
                    if owned.pop(partition, None) is None:
                        found.strays.append(f"{name} was to give up {partition}, which it did not own")
            case "polled":
                _poll(event, name, owned, found)
                epoch, before = after_poll
                for partition, span in owned.items():
                    if before.get(partition) is span:
                        span.last_epoch = max(span.last_epoch, epoch)
                after_poll = event["epoch"], dict(owned)
            case "committed":
                member = f"{name}/{event['member'][:8]}"
                times = event["invoked_at"], event["returned_at"]
                found.commits += [
                    Commit(member, event["epoch"], int(partition), offset, *times)
                    for partition, offset in event["offsets"].items()
                ]
            case "refused":
                found.refused.append(event["error"])
            case "error":
                found.errors.append(event["error"])
            case "broken":
                found.broken = event["error"]
            case "left":
                found.left = True
            case other:
                raise AssertionError(f"a member noted an event of the unknown kind {other!r}")
    return found


def _poll(event: Event, name: str, owned: dict[int, Span], found: Noted) -> None:
    for key, offsets in event["given"].items():
        found.processed += len(offsets)
        span = owned.get(int(key))
        if span is None:
            found.strays.append(f"{name} was handed {key}:{offsets[0]} to {offsets[-1]}")
        else:
            span.given.append(Given(event["asked_at"], event["done_at"], tuple(offsets)))
