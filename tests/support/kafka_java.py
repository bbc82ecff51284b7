"""Java's clients of Kafka, for tests: the jars of `./dev bench compare`, and a program in a JVM of its own."""

from __future__ import annotations

import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import IO, Final

import pytest

from bench.compare import Missing, kafka_jars

PROGRAMS: Final = Path(__file__).parent / "java"
JVM: Final = ("java", "-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-Xmx256m")
"""A JVM of a few minutes: to compile everything for speed takes longer than all of its work."""


def jars_or_skip(fetch: Callable[[], Path] = kafka_jars) -> Path:
    """Return the directory of Kafka's jars; skip the test where there is no JDK, or they cannot be fetched."""
    if shutil.which("javac") is None:
        pytest.skip("Java's clients judge nothing here: there is no Java compiler (install a JDK)")
    try:
        return fetch()
    except Missing as why:
        pytest.skip(f"Java's clients judge nothing here: {why}")


class JavaProgram:
    """One of `PROGRAMS` in a JVM. It says something with each line, and ends when its standard input does."""

    def __init__(
        self, jars: Path, name: str, *arguments: str, on_line: Callable[[str], None], errors: IO[str] | None = None
    ) -> None:
        """`on_line` runs in a thread of the program's. `errors`: where its standard error goes."""
        self._process = subprocess.Popen(
            [*JVM, "-cp", f"{jars}/*", str(PROGRAMS / f"{name}.java"), *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors or subprocess.DEVNULL,
            text=True,
        )
        self._on_line = on_line
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._on_line(line.strip())

    def is_alive(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def end(self, timeout_s: float) -> None:
        """Let it end, and wait until all that it says is read; it must not have failed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout_s) == 0, f"the Java client ended with exit code {self._process.returncode}"
        self._reader.join(timeout_s)

    def kill(self) -> None:
        """End it, whatever it does."""
        self._process.kill()
        self._process.wait()
