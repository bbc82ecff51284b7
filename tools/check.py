"""Checks of the checkout besides the tests: `./dev check [[--without] NAME...]`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import aio, contract, proto

ROOT = Path(__file__).resolve().parent.parent
Problems = list[str]


def _run(*command: str) -> Problems:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return [] if done.returncode == 0 else [done.stdout + done.stderr]


def _module(name: str, *arguments: str) -> Problems:
    return _run(sys.executable, "-m", name, *arguments)


def lint() -> Problems:
    """ruff finds nothing"""
    return _module("ruff", "check", "--no-cache", ".")


def formatting() -> Problems:
    """ruff would format nothing differently"""
    return _module("ruff", "format", "--no-cache", "--check", ".")


def types() -> Problems:
    """mypy --strict finds nothing"""
    return _module("mypy")


def generated() -> Problems:
    """raftlog/v1 is up to date with proto/, raftlog/aio with the synchronous clients"""
    with tempfile.TemporaryDirectory() as directory:
        proto.generate(Path(directory))
        stale = proto.differences(Path(directory))
    problems = [f"{', '.join(stale)}: out of date with proto/; run ./dev proto"] if stale else []
    if stale := aio.stale():
        problems.append(f"raftlog/aio/{', '.join(stale)}: out of date with the synchronous clients; run ./dev aio")
    return problems


def wire() -> Problems:
    """proto/ keeps the released contract, and buf, where there is one, finds nothing"""
    problems = [f"breaks the released contract: {problem}" for problem in contract.broken()]
    if buf := shutil.which("buf"):
        problems += _run(buf, "lint", "proto")
        problems += _run(buf, "breaking", "proto", "--against", str(contract.RELEASED))
    return problems


def reference() -> Problems:
    """docs/configuration.md, docs/metrics.md, docs/protocol.md, typed keywords and the chart's keys are up to date"""
    from tools.reference import stale  # it imports the server's packages; the other checks do not need them

    return [f"{page.relative_to(ROOT)} is stale; run ./dev docs" for page in stale()]


def lock() -> Problems:
    """the lock files cover pyproject.toml, with hashes and without addresses"""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    core: list[str] = project["project"]["dependencies"]
    extras: dict[str, list[str]] = project["project"]["optional-dependencies"]
    everything = [*core, *requirements_of(extras, extras)]
    in_image = [*core, *requirements_of(extras, ("server", "cli", "otel"))]
    groups = project["dependency-groups"]
    return [
        problem
        for name, requirements in (
            ("requirements.lock", everything),
            ("requirements-jre.lock", groups["jre"]),
            ("deploy/docker/requirements.lock", in_image),
            ("deploy/docker/requirements-build.lock", groups["image"]),
        )
        for problem in lock_problems(name, (ROOT / name).read_text(), requirements)
    ]


def requirements_of(extras: Mapping[str, list[str]], names: Iterable[str]) -> list[str]:
    """Return the requirements of these extras; `raftlog[OTHER]` stands for those of another extra."""
    found: list[str] = []
    for name in names:
        for line in extras[name]:
            wanted = Requirement(line)
            found += requirements_of(extras, sorted(wanted.extras)) if wanted.name == "raftlog" else [line]
    return found


def lock_problems(name: str, text: str, requirements: list[str]) -> Problems:
    """Return the problems of a lock file: an address, a missing hash, an unsatisfied requirement."""
    if re.search(r"://|^--", text, re.MULTILINE):
        return [f"{name}: it has an address or an option; a lock has only names, versions and hashes"]
    problems = []
    pins: dict[str, list[tuple[str, Marker | None]]] = {}
    for block in re.split(r"\n(?=\S)", text):
        if block.startswith("#") or not block.strip():
            continue
        pin = Requirement(block.split("\\")[0].strip())
        pins.setdefault(canonicalize_name(pin.name), []).append((str(pin.specifier).removeprefix("=="), pin.marker))
        if "--hash=sha256:" not in block:
            problems.append(f"{name}: {pin.name} has no hash")
    for line in requirements:
        wanted = Requirement(line)
        versions = [version for version, _ in pins.get(canonicalize_name(wanted.name), [])]
        if not versions:
            problems.append(f"{name}: {wanted.name} of pyproject.toml is missing; run ./dev lock")
        problems += [
            f"{name}: {wanted.name} {version} does not satisfy {wanted.specifier}; run ./dev lock"
            for version in versions
            if not wanted.specifier.contains(version, prereleases=True)
        ]
    return problems


def text() -> Problems:
    """no paths of one machine, no unfinished marks, no blanks at line ends"""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    problems = []
    for name in filter(None, listed.stdout.split("\0")):
        path = ROOT / name
        if not path.is_file() or name == "LICENSE" or name.startswith("raftlog/v1/"):
            continue
        try:
            content = path.read_text()
        except UnicodeDecodeError:
            continue
        problems += [f"{name}:{problem}" for problem in text_problems(content)]
    return problems


_UNWANTED = {
    r"(?<![\w.}])/(?:home|root|Users)/\w": "the path of one machine",
    r"\b(?:TO[D]O|FIX[M]E|X[X]X)\b": "an unfinished mark; finish it or open an issue",
    r"[ \t]+$": "blanks at the line's end",
}


def text_problems(content: str) -> Problems:
    """Return `line: what` for each unwanted text in a file."""
    problems = []
    for pattern, what in _UNWANTED.items():
        problems += [
            f"{content.count(chr(10), 0, found.start()) + 1}: {what}"
            for found in re.finditer(pattern, content, re.MULTILINE)
        ]
    if content and not content.endswith("\n"):
        problems.append(f"{content.count(chr(10)) + 1}: no newline at the file's end")
    return problems


_CHECKS: dict[str, Callable[[], Problems]] = {
    check.__name__: check for check in (lint, formatting, types, generated, wire, reference, lock, text)
}


def main(names: list[str]) -> int:
    """Run the named checks, or all, or all but those, and print their problems; return 1 if there are any."""
    without = names[:1] == ["--without"]
    names = names[without:]
    unknown = [name for name in names if name not in _CHECKS]
    if unknown:
        print(f"error: no check {', '.join(unknown)}; the checks are {', '.join(_CHECKS)}", file=sys.stderr)
        return 2
    failed = []
    for name in [each for each in _CHECKS if each not in names] if without else names or _CHECKS:
        started = time.monotonic()
        problems = _CHECKS[name]()
        outcome = "FAILED" if problems else "ok"
        print(f"{name:<11}{outcome:<7}{time.monotonic() - started:5.1f} s  {_CHECKS[name].__doc__}", flush=True)
        for problem in problems:
            print(problem.rstrip(), flush=True)
        failed += [name] if problems else []
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
