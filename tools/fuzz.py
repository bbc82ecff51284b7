"""`./dev fuzz`: sends hostile bytes to every decoder, handler and recovery; or runs one input again."""

from __future__ import annotations

import argparse
import faulthandler
import os
import subprocess
import sys
import traceback
from importlib.util import find_spec
from pathlib import Path

from tests.fuzz import server
from tests.fuzz.engines import ENGINES, Session, limit_memory
from tests.fuzz.minimise import failure, minimise
from tests.fuzz.registry import TARGETS

SECONDS = 30.0
STUCK_S = 300
"""After this time without progress, a target's traceback is printed and it ends."""


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if an input failed."""
    parser = argparse.ArgumentParser(prog="./dev fuzz", description=__doc__)
    parser.add_argument("target", nargs="?", choices=sorted(TARGETS), metavar="TARGET", help="by default all, in turn")
    parser.add_argument("--seconds", type=float, default=SECONDS, metavar="N", help="for each target; 30 by default")
    parser.add_argument("--engine", choices=sorted(ENGINES), help="atheris where it is installed, else random")
    parser.add_argument("--seed", type=int, default=0, help="the seed of random inputs")
    parser.add_argument("--input", type=Path, metavar="FILE", help="run this input only")
    parser.add_argument("--hex", metavar="BYTES", help="run this input only, given in hexadecimal digits")
    parser.add_argument("--minimise", action="store_true", help="with --input or --hex: make a failing one smaller")
    parser.add_argument("--list", action="store_true", help="list the targets")
    chosen = parser.parse_args(arguments)
    if chosen.list:
        width = max(map(len, TARGETS))
        for name, target in TARGETS.items():
            print(f"{name:<{width}}  {target.what}")
        return 0
    if chosen.input is not None or chosen.hex is not None:
        if chosen.target is None:
            parser.error("an input needs a target; name it")
        data = bytes.fromhex(chosen.hex) if chosen.input is None else chosen.input.read_bytes()
        return _run_one(chosen.target, data, smaller=chosen.minimise)
    engine = chosen.engine or ("atheris" if find_spec("atheris") is not None else "random")
    if engine == "atheris" and find_spec("atheris") is None:
        parser.error("atheris is not installed; ./dev exec uv pip install --group fuzz")
    if chosen.target is not None and os.environ.get("RAFTLOG_FUZZ_CHILD"):
        return _fuzz(chosen.target, engine, chosen.seconds, chosen.seed)
    names = [chosen.target] if chosen.target is not None else list(TARGETS)
    return max([_in_child(name, engine, chosen.seconds, chosen.seed) for name in names])


def _in_child(name: str, engine: str, seconds: float, seed: int) -> int:
    """Fuzz in a child process: a crash of the interpreter is a finding, and does not stop the other targets."""
    command = [sys.executable, "-m", "tools.fuzz", name, "--engine", engine, "--seconds", str(seconds)]
    code = subprocess.run(
        [*command, "--seed", str(seed)], env={**os.environ, "RAFTLOG_FUZZ_CHILD": "1"}, check=False
    ).returncode
    if code not in (0, 1):
        print(f"{name}: the process ended with {code}; again: ./dev fuzz {name} --engine {engine} --seed {seed}")
    return min(1, abs(code))


def _fuzz(name: str, engine: str, seconds: float, seed: int) -> int:
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds + STUCK_S, exit=True)
    limit_memory()
    target = TARGETS[name]
    target.prepare()
    session = Session(name, target, seconds, seed)
    try:
        ENGINES[engine](session)
    finally:
        server.stop()
    print(session, flush=True)
    return 1 if session.found else 0


def _run_one(name: str, data: bytes, *, smaller: bool) -> int:
    check = TARGETS[name].check
    try:
        error = failure(check, data)
        if error is None:
            print(f"{name}: {len(data)} bytes pass")
            return 0
        if smaller:
            data = minimise(check, data, error, seconds=120)
        traceback.print_exception(error)
        print(f"{name}: {len(data)} bytes fail: ./dev fuzz {name} --hex {data.hex() or repr('')}")
        return 1
    finally:
        server.stop()


if __name__ == "__main__":
    sys.exit(main())
