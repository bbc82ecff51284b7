"""The project's virtual environment: made from the hashed lock file, and remade when that changes.

Four steps, each with a stamp: the SHA-256 of all its inputs. A step whose stamp matches is skipped, so a call with
nothing to do takes a few milliseconds.

    venv        the path of the checkout, as a venv cannot be moved
    packages    requirements.lock
    java        JAVA_HOME and the path of Java; without a Java, requirements-jre.lock
    project     pyproject.toml
"""

from __future__ import annotations

import ast
import fcntl
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from tools import java
from tools.progress import Progress, StepFailed, run_logged

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
LOCK = ROOT / "requirements.lock"
JRE_LOCK = ROOT / "requirements-jre.lock"
_STAMPS = VENV / "raftlog-setup.json"
_LOG = VENV / "raftlog-setup.log"
_STEPS = ("venv", "packages", "java", "project")
_BUILD_BACKENDS = ("setuptools",)
"""Installed before the rest, because some packages exist only as source; their build tools are locked too."""
_INSTALLER = "uv"
"""Installs the rest in a third of pip's time (docs/adr/0045-uv-installs-the-lock-file.md)."""
_HASHED = ("--require-hashes", "--no-deps")
_UV_NAMES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "trusted-host": "UV_INSECURE_HOST",
    "default-timeout": "UV_HTTP_TIMEOUT",
    "timeout": "UV_HTTP_TIMEOUT",
    "cert": "SSL_CERT_FILE",
    "client-cert": "SSL_CLIENT_CERT",
    "proxy": "ALL_PROXY",
}
"""Settings of pip that say where packages come from, each with uv's variable for it; uv does not read pip's files."""


def _digest(*parts: str | bytes | Path) -> str:
    state = hashlib.sha256()
    for part in parts:
        data = part.read_bytes() if isinstance(part, Path) else part.encode() if isinstance(part, str) else part
        state.update(len(data).to_bytes(8, "little") + data)
    return state.hexdigest()


def _wanted_stamps() -> dict[str, str]:
    return {
        "venv": _digest(str(ROOT)),
        "packages": _digest(LOCK),
        "project": _digest(ROOT / "pyproject.toml"),
    }


def _read_stamps() -> dict[str, str]:
    try:
        stamps = json.loads(_STAMPS.read_bytes())
    except (OSError, ValueError):
        return {}
    return stamps if isinstance(stamps, dict) and PYTHON.exists() else {}


def _write_stamps(stamps: dict[str, str]) -> None:
    temporary = _STAMPS.with_suffix(".new")
    temporary.write_text(json.dumps(stamps, indent=1))
    os.replace(temporary, _STAMPS)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold a lock on the checkout, so that two calls do not build its environment at once."""
    descriptor = os.open(ROOT, os.O_RDONLY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print("setup: another ./dev is setting up this checkout, waiting for it", file=sys.stderr)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _outdated(stamps: dict[str, str]) -> list[str]:
    wanted = _wanted_stamps()
    outdated = [step for step in _STEPS if step != "java" and stamps.get(step) != wanted[step]]
    if "venv" in outdated:
        return list(_STEPS)
    if not java.is_known(stamps.get("java"), VENV, _digest(JRE_LOCK)):
        outdated.insert(outdated.index("project") if "project" in outdated else len(outdated), "java")
    return outdated


def ensure() -> None:
    """Bring the environment up to date.

    Raises:
        StepFailed: something could not be installed; the message says what to do.
    """
    if not _outdated(_read_stamps()):
        return
    with _one_at_a_time():
        stamps = _read_stamps()
        outdated = _outdated(stamps)
        for number, step in enumerate(outdated, 1):
            with Progress(f"setup {number}/{len(outdated)}") as progress:
                stamps.pop(step, None)
                if step != "venv":
                    _write_stamps(stamps)
                stamps[step] = _perform(step, progress)
                _write_stamps(stamps)


def _perform(step: str, progress: Progress) -> str:
    """Do one step and return its stamp."""
    if step == "java":
        return _set_up_java(progress)
    if step == "venv":
        _make_venv(progress)
    elif step == "packages":
        _install_packages(progress)
    else:
        progress.say("the project itself, editable")
        _pip(progress, "--no-deps", "--no-build-isolation", "--editable", str(ROOT))
    return _wanted_stamps()[step]


def _make_venv(progress: Progress) -> None:
    version = ".".join(map(str, sys.version_info[:3]))
    progress.say(f"virtual environment .venv with Python {version}")
    if find_spec("ensurepip") is None:
        raise StepFailed(
            f"this Python ({sys.executable}) cannot make virtual environments without the module ensurepip; "
            f"on Debian and Ubuntu: apt install python3.{sys.version_info.minor}-venv"
        )
    shutil.rmtree(VENV, ignore_errors=True)
    try:
        venv.create(VENV, with_pip=True, symlinks=True)
    except subprocess.CalledProcessError as error:
        raise StepFailed(f"making .venv failed: {error}; on Debian and Ubuntu: apt install python3-venv") from error


def locked_blocks(lock: Path) -> dict[str, str]:
    """Return the lock's entries, each with its hashes, by package name (versions of one name joined)."""
    blocks: dict[str, str] = {}
    name = ""
    for line in lock.read_text().splitlines(keepends=True):
        if line.startswith("#"):
            continue
        start = re.match(r"[A-Za-z0-9._-]+(?===)", line)
        if start:
            name = start[0].lower()
        blocks[name] = blocks.get(name, "") + line
    return blocks


def _install_packages(progress: Progress) -> None:
    blocks = locked_blocks(LOCK)
    title = f"{len(blocks)} packages from {LOCK.name} (PySpark alone is 450 MB)"
    progress.say(title)

    def pip(names: Iterable[str], *options: str) -> None:
        with tempfile.NamedTemporaryFile("w", suffix=".txt") as file:
            file.write("".join(blocks[name] for name in names))
            file.flush()
            _pip(progress, *_HASHED, *options, "--requirement", file.name)

    pip(_BUILD_BACKENDS, "--only-binary", ":all:")
    try:
        pip([_INSTALLER], "--only-binary", ":all:")
        _uv(progress)
    except StepFailed as error:
        with _LOG.open("a") as log:
            log.write(f"{error}\n")
        progress.say(f"{title}, by pip, because uv cannot install them here ({_LOG.name} says why)")
        pip(blocks.keys() - {_INSTALLER}, "--no-build-isolation")


def _uv(progress: Progress) -> None:
    """Install the whole lock file; nothing is compiled, since each module is when it is first imported."""
    settings = subprocess.run(
        [str(PYTHON), "-P", "-m", "pip", "config", "list"], capture_output=True, text=True, check=False, cwd=ROOT
    ).stdout
    variables = uv_variables(settings)
    uv = VENV / "bin" / _INSTALLER
    command = [str(uv), "pip", "install", "--python", str(PYTHON), *_HASHED, "--no-build-isolation", "--no-progress"]
    # Like pip, take what any of several indexes has: the hashes say which files are meant.
    command += ["--index-strategy", "unsafe-best-match", "--requirement", str(LOCK)]
    run_logged(progress, command, log=_LOG, cwd=ROOT, environment={**variables, **os.environ})


def uv_variables(settings: str) -> dict[str, str]:
    """Translate the output of `pip config list` to variables of uv: `install` wins, and the environment over both.

    Raises:
        StepFailed: uv has no such variable.
    """
    found: dict[str, dict[str, str]] = {"global": {}, "install": {}, ":env:": {}}
    for line in settings.splitlines():
        name, equals, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if equals and section in found:
            found[section][key] = str(ast.literal_eval(value))
    merged = {key: value for section in found.values() for key, value in section.items()}
    if merged.get("no-index", "false").lower() not in ("0", "false", "no", "off", ""):
        raise StepFailed("pip is told to use no index, and no variable tells uv so")
    return {
        _UV_NAMES[key]: ("," if key == "find-links" else " ").join(value.split())
        for key, value in merged.items()
        if key in _UV_NAMES
    }


def _set_up_java(progress: Progress) -> str:
    found = java.find()
    if found is not None:
        progress.say(f"Java {found.version} found at {found.home}")
        return java.stamp_of(found, _digest(JRE_LOCK))
    progress.say(f"no Java {java.OLDEST} or newer on the path or in JAVA_HOME; installing one from {JRE_LOCK.name}")
    try:
        _pip(
            progress,
            "--require-hashes",
            "--no-deps",
            "--only-binary",
            ":all:",
            "--requirement",
            str(JRE_LOCK),
        )
    except StepFailed as error:
        raise StepFailed(
            f"{error}\nThere may be no bundled Java for this platform. Install a JDK {java.OLDEST} or newer "
            f"(Debian and Ubuntu: apt install openjdk-{java.OLDEST}-jre-headless) or set JAVA_HOME to one, "
            "then call ./dev setup again"
        ) from error
    java.make_bundled(VENV)
    return java.stamp_of(None, _digest(JRE_LOCK))


def _pip(progress: Progress, *arguments: str) -> None:
    run_logged(
        progress,
        [str(PYTHON), "-P", "-m", "pip", "--disable-pip-version-check", "--no-input", "install", *arguments],
        log=_LOG,
        cwd=ROOT,
    )


def variables() -> dict[str, str]:
    """Return the process environment for a command that runs inside the virtual environment."""
    environment = dict(os.environ)
    environment.pop("PYTHONHOME", None)
    # Each server that a test starts would otherwise compile all that it imports: half of its start.
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    environment["VIRTUAL_ENV"] = str(VENV)
    environment["PATH"] = os.pathsep.join([str(VENV / "bin"), environment.get("PATH", os.defpath)])
    environment["PYSPARK_PYTHON"] = environment["PYSPARK_DRIVER_PYTHON"] = str(PYTHON)
    home = java.home_from_stamp(_read_stamps().get("java"), VENV)
    if home is not None:
        environment["JAVA_HOME"] = str(home)
    return environment
