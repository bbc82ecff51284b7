"""The working tree beside an earlier version: the same paths by turns, and which of them became slower.

    ./dev bench regression --against v0.1.0          a git ref, built as a wheel
    ./dev bench regression --against raftlog-0.1.0-py3-none-any.whl

Both run with the packages of this checkout's environment, the earlier one from its wheel. Each has a cluster of three
nodes and a client (`bench/regression_paths.py`), and both stay up during the run. In a round each takes each path once,
one after the other, and every round begins with the other one.

Two figures of a path are judged: the time for a record, and the CPU time for a record of the client and all brokers.
CPU time is the steadier one on a machine that does other work. A figure is worse if the median of the rounds' ratios is
above the limit, and the tree was behind in three rounds of four at least.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Final

import psutil

from bench.report import Report

ROOT: Final = Path(__file__).resolve().parents[1]
COUNTS: Final = {
    "produce": 100_000,
    "one-by-one": 1_000,
    "one-by-one-of-32": 4_000,
    "poll": 200_000,
    "poll-arrow": 400_000,
    "topics": 20,
}
"""How many records, or topics, a path takes in a round."""
ROUNDS: Final = 8
SLOWER_PERCENT: Final = 15.0
_OFTEN: Final = 0.75
"""The share of rounds in which the tree has to be behind."""


# What is compared


def build(ref: str, into: Path) -> Path:
    """Return the wheel of a git ref."""
    source = into / "source"
    packed = subprocess.run(["git", "archive", "--format=tar", ref], cwd=ROOT, capture_output=True, check=False)
    if packed.returncode:
        raise SystemExit(f"--against {ref!r} is neither a wheel nor a git ref: {packed.stderr.decode().strip()}")
    source.mkdir()
    subprocess.run(["tar", "-x", "-C", source], input=packed.stdout, check=True)
    command = [sys.executable, "-P", "-m", "hatchling", "build", "-t", "wheel", "-d", str(into)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    [wheel] = into.glob("*.whl")
    return wheel


def install(wheel: Path, directory: Path) -> Path:
    """Return the interpreter of a new environment with this wheel, and the packages of our own behind it.

    Those come from a `.pth` file, and what such a file adds is not searched for `.pth` files again: the editable
    install in our own environment does not reach the new one.
    """
    venv.create(directory, symlinks=True, with_pip=False)
    python = directory / "bin" / "python"
    [packages] = directory.glob("lib/python3.*/site-packages")
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    pip = [sys.executable, "-P", "-m", "pip", "--python", str(python), "install", "--quiet"]
    subprocess.run([*pip, "--no-deps", "--no-index", str(wheel)], check=True, cwd=directory)
    return python


@dataclass(frozen=True, slots=True)
class Spent:
    """The cost of one record in one run, in microseconds."""

    time_us: float
    cpu_us: float


class Side:
    """A version: its client and its cluster, which runs until `close`."""

    def __init__(self, python: Path, environment: Mapping[str, str] | None = None) -> None:
        self._process = subprocess.Popen(
            [str(python), "-P", str(Path(__file__).with_name("regression_paths.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the client's process has ended with exit code {self._process.wait()}")
        return line

    def until_ready(self) -> None:
        """Return once its cluster is up."""
        assert self._line() == "ready\n"

    def take(self, path: str, count: int) -> Spent:
        """Take a path once."""
        assert self._process.stdin is not None
        before_s = self._cpu_s()
        self._process.stdin.write(f"{path} {count}\n")
        self._process.stdin.flush()
        took = json.loads(self._line())
        used_s = self._cpu_s() - before_s
        return Spent(took["seconds"] / took["count"] * 1e6, used_s / took["count"] * 1e6)

    def _cpu_s(self) -> float:
        process = psutil.Process(self._process.pid)
        times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
        return sum(each.user + each.system for each in times)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


# The judgement


@dataclass(frozen=True, slots=True)
class Ratio:
    """How many times as much the tree took as the other version: the median of the rounds, the least, the most."""

    middle: float
    least: float
    most: float
    is_worse: bool

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float], slower_percent: float) -> Ratio:
        """Compare round by round."""
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        behind = sum(ratio > 1 for ratio in ratios)
        is_worse = median(ratios) > 1 + slower_percent / 100 and behind >= _OFTEN * len(ratios)
        return cls(median(ratios), min(ratios), max(ratios), is_worse)

    def __str__(self) -> str:
        return f"x{self.middle:.2f} ({self.least:.2f}-{self.most:.2f})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """A path in both versions, as medians, and the ratios of its rounds."""

    ours: Spent
    theirs: Spent
    time: Ratio
    cpu: Ratio

    @classmethod
    def of(cls, ours: Sequence[Spent], theirs: Sequence[Spent], slower_percent: float) -> Verdict:
        """Judge the rounds of a path."""
        time = Ratio.of([each.time_us for each in ours], [each.time_us for each in theirs], slower_percent)
        cpu = Ratio.of([each.cpu_us for each in ours], [each.cpu_us for each in theirs], slower_percent)
        return cls(_middle(ours), _middle(theirs), time, cpu)

    @property
    def is_slower(self) -> bool:
        return self.time.is_worse or self.cpu.is_worse

    def __str__(self) -> str:
        return (
            f"time {self.time}, {self.theirs.time_us:,.0f} -> {self.ours.time_us:,.0f} us; "
            f"CPU {self.cpu}, {self.theirs.cpu_us:,.0f} -> {self.ours.cpu_us:,.0f} us"
        )


def _middle(runs: Sequence[Spent]) -> Spent:
    return Spent(median(each.time_us for each in runs), median(each.cpu_us for each in runs))


def compare(
    ours: Side, theirs: Side, counts: Mapping[str, int], rounds: int, slower_percent: float
) -> dict[str, Verdict]:
    """Take the paths by turns; return the verdict on each. A round more than `rounds` warms up and does not count."""
    for side in (ours, theirs):
        side.until_ready()
    runs: dict[Side, dict[str, list[Spent]]] = {side: {path: [] for path in counts} for side in (ours, theirs)}
    for number in range(rounds + 1):
        turn = (ours, theirs) if number % 2 else (theirs, ours)
        for path, count in counts.items():
            for side in turn:
                spent = side.take(path, count)
                if number:
                    runs[side][path].append(spent)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return {path: Verdict.of(runs[ours][path], runs[theirs][path], slower_percent) for path in counts}


@contextlib.contextmanager
def sides(against: str, environment: Mapping[str, str] | None = None) -> Iterator[tuple[Side, Side]]:
    """Start the tree, with this environment, and the version that `against` names."""
    with tempfile.TemporaryDirectory(prefix="raftlog-regression-") as name, contextlib.ExitStack() as stack:
        directory = Path(name)
        wheel = Path(against) if against.endswith(".whl") else build(against, directory)
        python = install(wheel.resolve(), directory / "venv")
        started = [Side(Path(sys.executable), environment), Side(python)]
        for side in started:
            stack.callback(side.close)
        yield started[0], started[1]


def run(report: Report, against: str | None = None, slower_percent: float = SLOWER_PERCENT) -> None:
    """Compare with `against`; None: the last tag."""
    started_s = time.perf_counter()
    if against is None:
        told = subprocess.run(["git", "describe", "--tags", "--abbrev=0"], cwd=ROOT, capture_output=True, check=False)
        against = told.stdout.decode().strip()
        if not against:
            raise SystemExit("no release is tagged here: name a wheel or a git ref with --against")
    with sides(against) as (ours, theirs):
        verdicts = compare(ours, theirs, COUNTS, ROUNDS, slower_percent)
    for path, verdict in verdicts.items():
        report.add(
            "regression", f"{path}, beside {against}", str(verdict), f"<= +{slower_percent:g} %", not verdict.is_slower
        )
    report.add("regression", "took", f"{time.perf_counter() - started_s:.0f} s")
