"""The report: the findings of checks, and the checks that could not be made. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, Protocol

from raftlog._doctor.picture import SEVERITIES, Finding, Picture, Problem, Severity, Unanswered

UNKNOWN: Final = "not known"
"""The beginning of the reason for a check that was skipped because an answer is missing."""


class Finder(Protocol):
    """The function of a check."""

    def __call__(self, picture: Picture, /) -> Iterator[Problem]:
        """Yield the problems of a cluster."""
        ...


@dataclass(frozen=True)
class Check:
    """One kind of problem. `needs` names the fields of the picture without which the check is skipped."""

    id: str
    about: str
    needs: tuple[str, ...]
    find: Finder


class Checked(NamedTuple):
    """The result of a check: `ok`, `found`, `ignored` on request, or `skipped`, which has a reason in `why`."""

    check: str
    about: str
    result: str
    why: str


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings, the worst first, and the results of all checks."""

    cluster_id: str
    taken_at_ms: int
    findings: tuple[Finding, ...]
    checked: tuple[Checked, ...]
    unanswered: tuple[Unanswered, ...]

    def count(self, severity: Severity) -> int:
        """Return the number of findings of a severity."""
        return sum(found.severity == severity for found in self.findings)

    def worst(self) -> Severity | None:
        """Return the worst severity; None without findings."""
        return self.findings[0].severity if self.findings else None

    def skipped(self) -> list[Checked]:
        """Return the checks that could not be made."""
        return [each for each in self.checked if each.result == "skipped"]

    def is_whole(self) -> bool:
        """Return whether no check was skipped because an answer was missing."""
        return not any(each.why.startswith(UNKNOWN) for each in self.skipped())

    def document(self) -> dict[str, Any]:
        """Return the report as JSON values."""
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
    """Run all checks whose input is in the picture, except for `ignored` ones."""
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
        found = [Finding(check.id, *problem) for problem in check.find(picture)]
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
        return "it needs two readings, see --interval"
    return f"{UNKNOWN}: {', '.join(missing)}"
