"""The settings of a run that are given; its seed decides the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, cast

T = TypeVar("T")


@dataclass(frozen=True)
class Plan:
    """The settings that a scenario, or the shrinking of a failure, gives for a run."""

    options: Mapping[str, object] = field(default_factory=dict)
    """By name: in place of what the seed would draw (`Simulation.OPTIONS` of the kind)."""
    weights: Mapping[str, float] | None = None
    """How often each fault comes, relative to the others; None: the seed draws a mixture."""
    pace_s: float | None = None
    """How long it is from one fault to the next, on average; None: the seed decides."""
    without: frozenset[int] = frozenset()
    """The numbers of faults that are left out. The others are what they would have been."""

    def option(self, name: str, drawn: T) -> T:
        """Return the value given under this name, or else the drawn one."""
        return cast("T", self.options.get(name, drawn))  # `workloads` has looked at its type
