"""What a doctor says: what each check found, and which could not be made. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from raftlog._doctor.picture import SEVERITIES, Finding, Picture, Severity, Unanswered

UNKNOWN: Final = "not known"
"""How the reason for a skipped check begins when nobody answered what it needs."""


class Finder(Protocol):
    """What a check does."""

    def __call__(self, picture: Picture, /) -> Iterator[Finding]:
        """Yield what is found, under the check's id."""
        ...


@dataclass(frozen=True)
class Check:
    """One thing that may be wrong. `needs` names the parts of the picture without which it says nothing."""

    id: str
    about: str
    needs: tuple[str, ...]
    find: Finder


class Checked(NamedTuple):
    """How a check went: `ok`, `found`, `ignored` as was asked for, or `skipped`, and why the latter."""

    check: str
    about: str
    result: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """Findings, the worst ones first, and what was checked."""

    cluster_id: str
    taken_at_ms: int
    findings: tuple[Finding, ...]
    checked: tuple[Checked, ...]
    unanswered: tuple[Unanswered, ...]

    def count(self, severity: Severity) -> int:
        """Return how many findings there are of it."""
        return sum(found.severity == severity for found in self.findings)

    def worst(self) -> Severity | None:
        """Return the worst severity that was found; None: nothing was found."""
        return self.findings[0].severity if self.findings else None

    def skipped(self) -> list[Checked]:
        """Return the checks that could not be made."""
        return [each for each in self.checked if each.result == "skipped"]

    def is_whole(self) -> bool:
        """Whether every check could be made for which there was time: who did not answer may hide anything."""
        return not any(each.why.startswith(UNKNOWN) for each in self.skipped())

    def document(self) -> dict[str, Any]:
        """Return it for programs."""
        return {
            "cluster_id": self.cluster_id,
            "taken_at_ms": self.taken_at_ms,
            "worst": self.worst(),
            "counts": {severity: self.count(severity) for severity in SEVERITIES},
            "findings": [found._asdict() for found in self.findings],
            "checks": [each._asdict() for each in self.checked],
            "unanswered": [each._asdict() for each in self.unanswered],
        }


def examine(picture: Picture, checks: Iterable[Check], *, ignored: Collection[str] = ()) -> Report:
    """Make all checks for which the picture has enough, but for those that are `ignored`."""
    findings: list[Finding] = []
    checked: list[Checked] = []
    for check in checks:
        if check.id in ignored:
            checked.append(Checked(check.id, check.about, "ignored", ""))
            continue
        missing = [part for part in check.needs if getattr(picture, part) is None]
        if missing:
            checked.append(Checked(check.id, check.about, "skipped", _why(picture, missing)))
            continue
        found = list(check.find(picture))
        assert all(each.check == check.id for each in found), f"{check.id} finds under its own name"
        checked.append(Checked(check.id, check.about, "found" if found else "ok", ""))
        findings += found
    findings.sort(key=lambda found: SEVERITIES.index(found.severity))  # stable
    return Report(
        cluster_id=picture.cluster.cluster_id if picture.cluster is not None else "",
        taken_at_ms=picture.taken_at_ms,
        findings=tuple(findings),
        checked=tuple(checked),
        unanswered=tuple(picture.unanswered),
    )


def _why(picture: Picture, missing: Sequence[str]) -> str:
    reasons = [each.why for each in picture.unanswered if each.part in missing]
    if reasons:
        return f"{UNKNOWN}: {reasons[0]}"
    if any(part.endswith("_before") for part in missing):
        return "it takes two looks, see --interval"
    return f"{UNKNOWN}: {', '.join(missing)}"
