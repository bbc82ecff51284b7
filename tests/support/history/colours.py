"""Colours, patterns and the legend of a timeline."""

from __future__ import annotations

from typing import Final

from tests.support.history.model import Outcome

PAPER: Final = "#ffffff"
INK: Final = "#1e293b"
SOFT: Final = "#64748b"
RULE: Final = "#cbd5e1"
GRID: Final = "#eef2f6"
TRACK: Final = "#f1f5f9"
GOOD: Final = "#15803d"
BAD: Final = "#c81e1e"
FAULT: Final = "#f59e0b"
FAULT_INK: Final = "#92400e"
OUTAGE: Final = "#ef4444"
RATE: Final = "#64a3d8"

OUTCOMES: Final[dict[Outcome, str]] = {"ok": "#2a9d6f", "unknown": "#f08c00", "failed": "#d6246e"}

ALIVE: Final = "#cfe8d8"
DEAD: Final = "#475569"
PAUSED: Final = "url(#paused)"
CUT: Final = "url(#cut)"
HALF_CUT: Final = "url(#half-cut)"
HAMPERED: Final = "url(#hampered)"
EXCUSED: Final = "url(#excused)"
CONTROLLER: Final = "#1d3fbb"
LEADERS: Final = ("#0ea5e9", "#e879a6", "#84a921", "#a16207", "#7c5cd6", "#0d9488", "#f97352", "#64748b")
"""By partition, from the start again after the last one."""


def _stripes(name: str, ground: str, stripe: str, angle: int, width: float = 3) -> str:
    """Return a pattern of oblique stripes."""
    return (
        f'<pattern id="{name}" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate({angle})">'
        f'<rect width="6" height="6" fill="{ground}"/><rect width="{width:g}" height="6" fill="{stripe}"/></pattern>'
    )


DEFINITIONS: Final = "".join(
    (
        _stripes("paused", "#fde68a", "#f2b705", 45),
        _stripes("cut", "#ddd6fe", "#8b5cf6", -45),
        _stripes("half-cut", "#f1edff", "#b7a4f7", -45, 1.6),
        _stripes("hampered", "#cfe8d8", "#d9b38c", 0, 2),
        _stripes("excused", "#f1f5f9", "#b8c3d1", 45, 1.4),
    )
)

LEGEND: Final = (
    (
        ("", "#Nodes"),
        (ALIVE, "runs"),
        (DEAD, "dead"),
        (PAUSED, "paused"),
        (CUT, "cut off from everybody"),
        (HALF_CUT, "some links cut, or one way"),
        (HAMPERED, "slow, full, lossy or its clock is wrong"),
        (CONTROLLER, "controller"),
        (LEADERS[0], "leads partition 0"),
        (LEADERS[1], "1"),
        (LEADERS[2], "2 …"),
    ),
    (
        ("", "#Operations"),
        (OUTCOMES["ok"], "ok"),
        (OUTCOMES["unknown"], "unknown: no answer"),
        (OUTCOMES["failed"], "failed, or aborted"),
        (RATE, "acknowledged writes"),
        (OUTAGE, "outage: asked and not answered"),
        (EXCUSED, "no majority possible"),
        (FAULT, "fault"),
    ),
)
