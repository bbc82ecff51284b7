"""The set-up does what is needed, once, also when two calls come at the same time."""

from __future__ import annotations

import ast
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tools import environment
from tools.progress import Progress, StepFailed

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from tools import environment, java

root = Path(sys.argv[2])
for name, path in {"ROOT": root, "VENV": root / ".venv", "PYTHON": root / ".venv" / "bin" / "python",
                   "LOCK": root / "requirements.lock", "JRE_LOCK": root / "requirements-jre.lock",
                   "_STAMPS": root / ".venv" / "stamps.json"}.items():
    setattr(environment, name, path)
java.is_known = lambda stamp, venv, digest: stamp == "java"

def perform(step, progress):
    environment.PYTHON.parent.mkdir(parents=True, exist_ok=True)
    environment.PYTHON.touch()
    (root / "begun").touch()
    while (root / "hold").exists():
        time.sleep(0.01)
    if step == sys.argv[3]:
        raise environment.StepFailed("no network")
    with (root / "performed").open("a") as file:
        file.write(step + "\\n")
    return "java" if step == "java" else environment._wanted_stamps()[step]

environment._perform = perform
try:
    environment.ensure()
except environment.StepFailed as error:
    sys.exit(f"failed: {error}")
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    for name in ("requirements.lock", "requirements-jre.lock", "pyproject.toml"):
        (tmp_path / name).write_text("first\n")
    return tmp_path


def start(checkout: Path, failing: str = "") -> subprocess.Popen[str]:
    command = [sys.executable, "-c", PROGRAM, str(ROOT), str(checkout), failing]
    return subprocess.Popen(command, stderr=subprocess.PIPE, text=True)


def performed(checkout: Path) -> list[str]:
    steps = (checkout / "performed").read_text().split()
    (checkout / "performed").unlink()
    return steps


def ensure(checkout: Path, failing: str = "") -> int:
    process = start(checkout, failing)
    process.communicate()
    return process.returncode


def test_two_calls_at_once_do_every_step_once(checkout: Path) -> None:
    (checkout / "hold").touch()
    first = start(checkout)
    while not (checkout / "begun").exists():
        assert first.poll() is None
        time.sleep(0.01)
    second = start(checkout)
    assert second.stderr is not None
    assert "waiting for it" in second.stderr.readline()
    (checkout / "hold").unlink()
    first.communicate()
    second.communicate()
    assert (first.returncode, second.returncode) == (0, 0)
    assert performed(checkout) == ["venv", "packages", "java", "project"]


@pytest.mark.parametrize(
    ("changed", "again"), [("requirements.lock", ["packages"]), ("pyproject.toml", ["project"]), ("README.md", [])]
)
def test_only_what_has_changed_is_done_again(checkout: Path, changed: str, again: list[str]) -> None:
    assert ensure(checkout) == 0
    performed(checkout)
    (checkout / changed).write_text("second\n")
    (checkout / "performed").touch()
    assert ensure(checkout) == 0
    assert performed(checkout) == again


def test_a_step_that_failed_is_done_again_and_what_was_done_is_not(checkout: Path) -> None:
    assert ensure(checkout, failing="java") == 1
    assert performed(checkout) == ["venv", "packages"]
    assert ensure(checkout) == 0
    assert performed(checkout) == ["java", "project"]


def test_an_interpreter_that_has_gone_means_to_begin_anew(checkout: Path) -> None:
    assert ensure(checkout) == 0
    performed(checkout)
    (checkout / ".venv" / "bin" / "python").unlink()
    assert ensure(checkout) == 0
    assert performed(checkout) == ["venv", "packages", "java", "project"]


def test_a_python_without_ensurepip_is_told_which_package_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "find_spec", lambda name: None)
    with pytest.raises(StepFailed, match=rf"ensurepip.*apt install python3\.{sys.version_info.minor}-venv"):
        environment._make_venv(Progress("test"))


def test_the_lock_falls_into_its_entries(tmp_path: Path) -> None:
    lock = tmp_path / "lock"
    lock.write_text("# by\na-b==1 \\\n    --hash=1\nC==2 ; x \\\n    --hash=2\nC==3 ; y \\\n    --hash=3\n")
    assert environment.locked_blocks(lock) == {
        "a-b": "a-b==1 \\\n    --hash=1\n",
        "c": "C==2 ; x \\\n    --hash=2\nC==3 ; y \\\n    --hash=3\n",
    }


def test_an_old_python_is_told_what_is_needed() -> None:
    """`dev` itself has to stay readable for old Pythons: it compiles with the oldest grammar that `ast` offers."""
    ast.parse((ROOT / "dev").read_text(), feature_version=(3, 4))


def test_what_runs_inside_keeps_its_bytecode_and_knows_no_other_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    found = environment.variables()
    assert found.keys() & {"PYTHONDONTWRITEBYTECODE", "PYTHONHOME"} == set()
    assert found["PATH"].startswith(str(environment.VENV / "bin"))
