"""The commands of `./dev`. Each takes the arguments after its name and returns the exit code."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools import environment
from tools.environment import PYTHON, ROOT
from tools.progress import StepFailed

Command = Callable[[list[str]], int]


def main(arguments: list[str]) -> int:
    """Run a command and return its exit code."""
    commands = _commands()
    name, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if name in ("help", "-h", "--help"):
        _print_help(commands)
        return 0
    if name not in commands:
        print(f"error: no command {name!r}; ./dev help lists them", file=sys.stderr)
        return 2
    if rest and name in _WITHOUT_ARGUMENTS:
        print(f"error: {name} takes no arguments, got {' '.join(rest)}", file=sys.stderr)
        return 1
    try:
        return commands[name](rest)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


_MODULES = {
    "demo": ("raftlog_demo", "stream real records through Spark into raftlog, read them back, compare"),
    "check": (
        "tools.check",
        "lint, format, types, generated code and pages, lock files, text: ./dev check [[--without] NAME...]",
    ),
    "sim": (
        "tools.sim",
        "simulate quorums, brokers, groups, transactions: ./dev sim SEED [--trace], --count N, --mutations, --help",
    ),
    "fuzz": (
        "tools.fuzz",
        "feed hostile bytes to decoders, handlers and recovery: ./dev fuzz [TARGET] [--seconds N], --list, --help",
    ),
    "bench": ("bench", "measure: ./dev bench --help"),
    "image": (
        "tools.docker",
        "build the container image, and its base if no registry is reachable: ./dev image --help",
    ),
    "chart": ("tools.helm", "render the chart's examples into deploy/k8s/manifests, with helm"),
    "k8s": ("tools.k8s", "a real Kubernetes of three nodes on this machine: ./dev k8s up|down|status|load|test"),
    "proto": (
        "tools.proto",
        "generate raftlog/v1 from proto/; --release records the contract that later ones must keep",
    ),
    "aio": ("tools.aio", "generate the awaitable clients in raftlog/aio from the synchronous ones"),
    "docs": (
        "tools.reference",
        "write the generated docs pages, the table in docs/protocol.md, the typed keywords and the keys of the chart",
    ),
}
"""Commands that are modules, with their help."""
_WITHOUT_ARGUMENTS = ("setup", "chart", "aio", "docs")
_ORDER = (
    "setup",
    "demo",
    "test",
    "check",
    "sim",
    "fuzz",
    "bench",
    "image",
    "chart",
    "k8s",
    "proto",
    "aio",
    "docs",
    "lock",
    "exec",
)


def _commands() -> dict[str, Command]:
    functions = {"setup": _setup, "test": _test, "lock": _lock, "exec": _exec}
    return {name: functions.get(name) or _module_command(name) for name in _ORDER}


def _module_command(name: str) -> Command:
    module, about = _MODULES[name]

    def run(arguments: list[str]) -> int:
        return _in_environment(PYTHON, *(["-P"] if name == "demo" else []), "-m", module, *arguments)

    run.__doc__ = about
    return run


def _print_help(commands: dict[str, Command]) -> None:
    print("usage: ./dev COMMAND [ARGUMENT...]\n")
    for name, command in commands.items():
        print(f"  {name:<8}{(command.__doc__ or '').splitlines()[0]}")
    print("\nEvery command first sets up .venv if it is missing or out of date.")


def _in_environment(*command: str | Path) -> int:
    environment.ensure()
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment.variables(), check=False
    ).returncode


def _setup(arguments: list[str]) -> int:
    """install everything that the project needs into .venv, and Java if there is none"""
    environment.ensure()
    print(f"ready: {PYTHON.relative_to(ROOT)}; try ./dev demo")
    return 0


def _test(arguments: list[str]) -> int:
    """run the tests: ./dev test [--long] [--phase-1 | --phase-2 | --phase-3 | PYTEST-ARGUMENT...]"""
    long = "--long" in arguments
    selection = ["-rfEs"]  # also reports skipped tests, with reasons
    selection += ["--hypothesis-profile=long"] if long else ["-m", "not long"]
    cores = os.cpu_count() or 1
    # Tests without servers come first, with a worker more than cores, as they wait for two fifths of their time;
    # servers and Spark never run beside them, and tests with containers, which take all cores, beside nothing. With
    # servers, the worker more than cores has only the files that wait for most of their time (tests/conftest.py):
    # with any file, servers and Spark starve each other where a core has half of the usual speed. A file's tests stay
    # together, as they share servers.
    phases = {
        "--phase-1": (cores + 1, ("tests/unit", "tests/conformance", "tests/simulation", "tests/fuzz")),
        "--phase-2": (cores + 1, ("tests/integration",)),
        "--phase-3": (1, ("tests/chaos",)),
    }
    rest = [argument for argument in arguments if argument not in ("--long", *phases)]
    chosen = [phases[name] for name in phases if name in arguments]
    if chosen and rest:
        raise StepFailed(f"a phase is whole: leave out {' '.join(rest)}, or the phase")
    if rest:
        return _in_environment(PYTHON, "-m", "pytest", *selection, *rest)
    seed = os.environ.setdefault("SIMULATION_SEED", str(random.SystemRandom().randrange(10**6, 10**9)))
    print(f"fresh schedules: SIMULATION_SEED={seed}", flush=True)
    # A worker that dies ends the run: xdist would wait forever for its replacement. tests/conftest.py
    # makes the run a failure then. A worker whose test hangs prints its threads and dies (`faulthandler_timeout`).
    common = [*selection, "--dist", "loadfile", "--no-loadscope-reorder", "--max-worker-restart=0"]
    common += ["--durations=20", "--durations-min=10"]
    common += [] if long else ["--override-ini=faulthandler_exit_on_timeout=true"]
    codes = [
        _in_environment(PYTHON, "-m", "pytest", *common, "-n", str(workers), *directories)
        for workers, directories in chosen or phases.values()
    ]
    return int(any(codes))  # a process that a signal ended has a negative code


def _lock(arguments: list[str]) -> int:
    """update the lock files from pyproject.toml: ./dev lock [--upgrade]"""
    if arguments not in ([], ["--upgrade"]):
        raise StepFailed(f"lock takes --upgrade or nothing, not {' '.join(arguments)}")
    environment.ensure()
    uv = environment.VENV / "bin" / "uv"
    if not uv.exists():
        raise StepFailed("lock needs uv, and there is no wheel of it for this platform")
    compile_lock: list[str | Path] = [
        *(uv, "pip", "compile", "--quiet", "--universal", "--python-version", "3.11", "--generate-hashes"),
        *(
            "--no-annotate",
            "--no-emit-index-url",
            "--no-emit-find-links",
            "--custom-compile-command",
            "./dev lock",
        ),
        *arguments,
    ]
    extras = [part for extra in ("all", "bench", "dev") for part in ("--extra", extra)]
    in_image = [part for extra in ("server", "cli", "console", "otel") for part in ("--extra", extra)]
    image: list[str | Path] = [*compile_lock, "--constraint", environment.LOCK.name]  # the tested versions
    steps = (
        [*compile_lock, "pyproject.toml", *extras, "--output-file", environment.LOCK.name],
        [*compile_lock, "--group", "jre", "--output-file", environment.JRE_LOCK.name],
        [*image, "pyproject.toml", *in_image, "--output-file", "deploy/docker/requirements.lock"],
        [*image, "--group", "image", "--output-file", "deploy/docker/requirements-build.lock"],
    )
    return next(filter(None, (_in_environment(*step) for step in steps)), 0)


def _exec(arguments: list[str]) -> int:
    """run a command inside the project's environment: ./dev exec COMMAND [ARGUMENT...]"""
    if not arguments:
        raise StepFailed("exec needs a command, for example: ./dev exec raftlog --help")
    environment.ensure()
    variables = environment.variables()
    try:
        os.execvpe(arguments[0], arguments, variables)
    except FileNotFoundError:
        raise StepFailed(f"{arguments[0]}: no such command") from None
