"""The commands of `./dev`. Each takes the arguments after its name and returns the exit code."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tools import environment
from tools.environment import PYTHON, ROOT
from tools.progress import StepFailed

Command = Callable[[list[str]], int]


def main(arguments: list[str]) -> int:
    """Run one command; what it prints and its exit code are the command's own."""
    commands = _commands()
    name, rest = (arguments[0], arguments[1:]) if arguments else ("help", [])
    if name in ("help", "-h", "--help"):
        _print_help(commands)
        return 0
    if name not in commands:
        print(f"error: there is no command {name!r}; ./dev help lists them", file=sys.stderr)
        return 2
    try:
        return commands[name](rest)
    except StepFailed as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _commands() -> dict[str, Command]:
    return {
        "setup": _setup,
        "demo": _demo,
        "test": _test,
        "check": _check,
        "sim": _sim,
        "fuzz": _fuzz,
        "bench": _bench,
        "image": _image,
        "chart": _chart,
        "proto": _proto,
        "docs": _docs,
        "lock": _lock,
        "exec": _exec,
    }


def _print_help(commands: dict[str, Command]) -> None:
    print("usage: ./dev COMMAND [ARGUMENT...]\n")
    for name, command in commands.items():
        print(f"  {name:<8}{(command.__doc__ or '').splitlines()[0]}")
    print("\nEvery command sets up .venv first when that is missing or out of date.")


def _in_environment(*command: str | Path) -> int:
    environment.ensure()
    return subprocess.run(
        [str(part) for part in command], cwd=ROOT, env=environment.variables(), check=False
    ).returncode


def _setup(arguments: list[str]) -> int:
    """install everything the project needs into .venv (and Java, where there is none)"""
    _no_arguments("setup", arguments)
    environment.ensure()
    print(f"ready: {PYTHON.relative_to(ROOT)}; try ./dev demo")
    return 0


def _demo(arguments: list[str]) -> int:
    """stream real records through Spark into raftlog, read them back, compare"""
    return _in_environment(PYTHON, "-P", "-m", "raftlog_demo", *arguments)


def _test(arguments: list[str]) -> int:
    """run the tests: ./dev test [--long] [PYTEST-ARGUMENT...]"""
    long = "--long" in arguments
    selection = [] if long else ["-m", "not long"]
    rest = [argument for argument in arguments if argument != "--long"]
    if rest:
        return _in_environment(PYTHON, "-m", "pytest", *selection, *rest)
    # Files stay whole because their tests share servers; one worker more than cores because many tests wait for those.
    workers = (os.cpu_count() or 1) + 1
    reasons = "-rfEs"  # also of what was skipped: containers need what not every machine has
    return _in_environment(PYTHON, "-m", "pytest", *selection, reasons, "-n", str(workers), "--dist", "loadfile")


def _check(arguments: list[str]) -> int:
    """lint, format, types, generated code and pages, lock files, text: ./dev check [NAME...]"""
    return _in_environment(PYTHON, "-m", "tools.check", *arguments)


def _sim(arguments: list[str]) -> int:
    """simulate quorums, brokers, groups, transactions: ./dev sim SEED [--trace], --count N, --mutations, --help"""
    return _in_environment(PYTHON, "-m", "tools.sim", *arguments)


def _fuzz(arguments: list[str]) -> int:
    """feed hostile bytes to decoders, handlers and recovery: ./dev fuzz [TARGET] [--seconds N], --list, --help"""
    return _in_environment(PYTHON, "-m", "tools.fuzz", *arguments)


def _bench(arguments: list[str]) -> int:
    """measure: ./dev bench --help"""
    return _in_environment(PYTHON, "-m", "bench", *arguments)


def _image(arguments: list[str]) -> int:
    """build the container image, and its base where no registry is reached: ./dev image --help"""
    return _in_environment(PYTHON, "-m", "tools.docker", *arguments)


def _chart(arguments: list[str]) -> int:
    """render the chart's examples into deploy/k8s/manifests, with helm"""
    _no_arguments("chart", arguments)
    return _in_environment(PYTHON, "-m", "tools.helm")


def _proto(arguments: list[str]) -> int:
    """generate raftlog/v1 from proto/"""
    _no_arguments("proto", arguments)
    return _in_environment(PYTHON, "-m", "tools.proto")


def _docs(arguments: list[str]) -> int:
    """write docs/configuration.md and docs/metrics.md from the code"""
    _no_arguments("docs", arguments)
    return _in_environment(PYTHON, "-m", "tools.reference")


def _lock(arguments: list[str]) -> int:
    """resolve pyproject.toml into the lock files anew: ./dev lock [--upgrade]"""
    if arguments not in ([], ["--upgrade"]):
        raise StepFailed(f"lock takes --upgrade or nothing, not {' '.join(arguments)}")
    uv = environment.VENV / "bin" / "uv"
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
    extras = [part for extra in ("dev", "spark", "bench", "otel", "testing") for part in ("--extra", extra)]
    image: list[str | Path] = [*compile_lock, "--constraint", environment.LOCK.name]  # the versions that were tested
    steps = (
        [*compile_lock, "pyproject.toml", *extras, "--output-file", environment.LOCK.name],
        [*compile_lock, "--group", "jre", "--output-file", environment.JRE_LOCK.name],
        [*image, "pyproject.toml", "--extra", "otel", "--output-file", "deploy/docker/requirements.lock"],
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


def _no_arguments(name: str, arguments: list[str]) -> None:
    if arguments:
        raise StepFailed(f"{name} takes no arguments, got {' '.join(arguments)}")
