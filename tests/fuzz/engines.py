"""Where inputs come from in the long form: changes of what was interesting before, Hypothesis, or atheris.

    random       the corpus, changed and crossed over; an input that reaches a line that none before reached is kept
    hypothesis   its own generation and shrinking
    atheris      libFuzzer by coverage, where it is installed (`uv pip install --group fuzz`); 3.11 to 3.13

Inputs are kept in `.fuzz/TARGET/corpus`, failing ones minimised in `.fuzz/TARGET/found`.
"""

from __future__ import annotations

import hashlib
import os
import random
import resource
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any, Final

from tests.fuzz.choices import Choices, mutate
from tests.fuzz.minimise import failure, minimise, signature
from tests.fuzz.registry import Target

ROOT: Final = Path(__file__).resolve().parents[2]
LIVE: Final = ROOT / ".fuzz"
MEMORY_BYTES: Final = 6 << 30
"""Address space of a process that fuzzes: a runaway allocation ends in a MemoryError, not in the machine's."""
LARGEST: Final = 600
_PACKAGES: Final = ("raftlog", "raftmeta", "replication", "broker")
_PRODUCT: Final = tuple(f"{ROOT}/{package}/" for package in _PACKAGES)


@dataclass
class Session:
    """One target being fuzzed for a while."""

    name: str
    target: Target
    seconds: float
    seed: int
    say: Callable[[str], None] = print
    inputs: int = 0
    kept: int = 0
    found: dict[tuple[str, ...], Path] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Make the directories."""
        self.corpus, self.failing = LIVE / self.name / "corpus", LIVE / self.name / "found"
        self.corpus.mkdir(parents=True, exist_ok=True)
        self.failing.mkdir(parents=True, exist_ok=True)
        self.begin()

    def begin(self) -> None:
        """Let the time count from now on."""
        self.until = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Whether the time is up."""
        return time.monotonic() >= self.until

    def keep(self, data: bytes) -> None:
        """Add an input to the corpus."""
        self.kept += 1
        (self.corpus / _name(data)).write_bytes(data)

    def try_input(self, data: bytes) -> bool:
        """Run one input; a failure that is new is minimised and written down. Returns whether it passed."""
        self.inputs += 1
        error = failure(self.target.check, data)
        if error is None:
            return True
        kind = signature(error)
        if kind not in self.found:
            small = minimise(self.target.check, data, error)
            path = self.found[kind] = self.failing / _name(small)
            path.write_bytes(small)
            shown = failure(self.target.check, small) or error
            command = f"./dev fuzz {self.name} --input {path.relative_to(ROOT)}"
            self.say(f"{self.name}: {type(shown).__name__}: {str(shown)[:500]}\n  {small.hex()}\n  {command}")
            for note in getattr(shown, "__notes__", ()):
                self.say(f"  {note[:1000]}")
        return False

    def __str__(self) -> str:
        return (
            f"{self.name}: {self.inputs} inputs in {self.seconds:.0f} s, {self.kept} kept, "
            f"{len(self.found)} failures (seed {self.seed})"
        )


def _name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()[:16]


def limit_memory() -> None:
    """Bound what this process may allocate, protobuf and Arrow included."""
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, hard))


# Coverage by the interpreter's own tracing: which lines of the product an input reaches.


class _Coverage:
    def __init__(self) -> None:
        self.seen: set[tuple[CodeType, int]] = set()
        self._new = False

    def _call(self, frame: FrameType, event: str, _arg: Any) -> Any:
        return self._line if frame.f_code.co_filename.startswith(_PRODUCT) else None

    def _line(self, frame: FrameType, event: str, _arg: Any) -> Any:
        place = (frame.f_code, frame.f_lineno)
        if place not in self.seen:
            self.seen.add(place)
            self._new = True
        return self._line

    def reaches_more(self, run: Callable[[], object]) -> bool:
        """Run something; return whether it has come to a line that nothing before came to."""
        self._new = False
        before = sys.gettrace()
        sys.settrace(self._call)
        try:
            run()
        finally:
            sys.settrace(before)
        return self._new


def run_random(session: Session) -> None:
    """Mutate the corpus. One input in a few is traced, as that is slow."""
    dice, coverage = random.Random(session.seed), _Coverage()
    corpus = [path.read_bytes() for path in sorted(session.corpus.iterdir())]
    for data in corpus:
        if session.is_over:
            return
        coverage.reaches_more(lambda data=data: session.try_input(data))  # type: ignore[misc] # its own in each turn
    while not session.is_over:
        data = _next_input(dice, corpus)
        if dice.random() < 0.7:
            session.try_input(data)
        elif coverage.reaches_more(lambda data=data: session.try_input(data)):  # type: ignore[misc] # as above
            corpus.append(data)
            session.keep(data)


def _next_input(dice: random.Random, corpus: list[bytes]) -> bytes:
    if not corpus or dice.random() < 0.3:
        return dice.randbytes(dice.choice((4, 16, 60, 200, LARGEST)))
    data = dice.choice(corpus)
    if dice.random() < 0.3:
        other = dice.choice(corpus)
        data = data[: dice.randint(0, len(data))] + other[dice.randint(0, len(other)) :]
    return mutate(data, Choices(dice.randbytes(60)), LARGEST)


def run_hypothesis(session: Session) -> None:
    """Let Hypothesis generate, some hundred at a time."""
    from hypothesis import HealthCheck, Phase, given, seed, settings
    from hypothesis import strategies as st

    number = session.seed
    while not session.is_over:

        @seed(number)
        @settings(
            max_examples=200,
            deadline=None,
            database=None,
            phases=[Phase.generate],
            suppress_health_check=list(HealthCheck),
        )
        @given(st.binary(max_size=LARGEST))
        def some(data: bytes) -> None:
            if not session.is_over:
                session.try_input(data)

        some()
        number += 1


def _functions_of_the_product() -> Iterator[FunctionType]:
    """Yield the product's modules that have been imported; to look at all modules of the process would take minutes."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in _PACKAGES or name.startswith("raftlog.v1"):
            continue
        for owner in [module, *(each for each in vars(module).values() if isinstance(each, type))]:
            for each in list(vars(owner).values()):
                function = getattr(each, "__func__", each)
                if isinstance(function, FunctionType) and function.__module__ == name:
                    yield function


def run_atheris(session: Session) -> None:
    """Let libFuzzer generate by coverage; it ends the process, so the caller has made one for it."""
    atheris: Any = import_module("atheris")  # optional

    for function in _functions_of_the_product():
        atheris.instrument_func(function)
    session.begin()  # that took a while
    before = sum(1 for _ in session.corpus.iterdir())

    def one(data: bytes) -> None:
        session.try_input(data)
        if session.is_over:
            session.kept = sum(1 for _ in session.corpus.iterdir()) - before  # libFuzzer writes them down
            session.say(str(session))
            sys.stdout.flush()
            os._exit(1 if session.found else 0)  # libFuzzer has no other end

    options = [sys.argv[0], str(session.corpus), f"-seed={session.seed}", f"-max_len={LARGEST}", "-verbosity=0"]
    atheris.Setup([*options, "-rss_limit_mb=0", "-timeout=120"], one)
    atheris.Fuzz()


ENGINES: Final = {"random": run_random, "hypothesis": run_hypothesis, "atheris": run_atheris}
