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


def test_uv_gets_packages_from_where_pip_does() -> None:
    settings = """\
:env:.find-links='/wheels /more'
:env:.index-url='https://name:word@third.example/simple'
global.cert='/certificates.pem'
global.extra-index-url='\\nhttps://fourth.example/simple\\nhttps://fifth.example/simple'
global.index-url='https://first.example/simple'
global.no-index='false'
install.index-url='https://second.example/simple'
install.no-compile='true'
"""
    assert environment.uv_variables(settings) == {
        "UV_DEFAULT_INDEX": "https://name:word@third.example/simple",
        "UV_INDEX": "https://fourth.example/simple https://fifth.example/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "SSL_CERT_FILE": "/certificates.pem",
    }


@pytest.mark.parametrize("fails", ["its wheel", "its run", "no-index"])
def test_pip_installs_where_uv_cannot(
    fails: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []

    def pip(progress: Progress, *arguments: str) -> None:
        lock = Path(arguments[arguments.index("--requirement") + 1])
        commands.append([*arguments[: arguments.index("--requirement")], *sorted(environment.locked_blocks(lock))])
        if fails == "its wheel" and "uv" in commands[-1]:
            raise StepFailed("no wheel for this platform")

    lock = tmp_path / "requirements.lock"
    lock.write_text("setuptools==1 \\\n    --hash=1\nuv==1 \\\n    --hash=1\nnumpy==1 \\\n    --hash=1\n")
    for name, value in {"_pip": pip, "LOCK": lock, "VENV": tmp_path, "_LOG": tmp_path / "log"}.items():
        monkeypatch.setattr(environment, name, value)
    monkeypatch.setattr(environment, "PYTHON", Path(sys.executable))
    monkeypatch.setenv("PIP_NO_INDEX", str(fails == "no-index"))
    uv = tmp_path / "bin" / "uv"
    uv.parent.mkdir()
    uv.write_text("#!/bin/sh\necho no such option\nexit 2\n")
    uv.chmod(0o755)
    environment._install_packages(Progress("test"))
    hashed = ["--require-hashes", "--no-deps"]
    assert commands == [
        [*hashed, "--only-binary", ":all:", "setuptools"],
        [*hashed, "--only-binary", ":all:", "uv"],
        [*hashed, "--no-build-isolation", "numpy", "setuptools"],
    ]
    assert "by pip, because uv cannot install them here" in capsys.readouterr().err
    why = {"its wheel": "no wheel for this platform", "its run": "no such option", "no-index": "use no index"}[fails]
    assert why in (tmp_path / "log").read_text()


def test_an_old_python_is_told_what_is_needed() -> None:
    """`dev` itself has to stay readable for old Pythons: it compiles with the oldest grammar that `ast` offers."""
    ast.parse((ROOT / "dev").read_text(), feature_version=(3, 4))


def test_what_runs_inside_keeps_its_bytecode_and_knows_no_other_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    monkeypatch.setenv("PYTHONHOME", "/elsewhere")
    found = environment.variables()
    assert found.keys() & {"PYTHONDONTWRITEBYTECODE", "PYTHONHOME"} == set()
    assert found["PATH"].startswith(str(environment.VENV / "bin"))
