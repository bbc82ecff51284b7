"""What is installed here: the server's packages, how processes of them start and keep memory, which extras are missing.

The server (`broker`, `raftmeta`, `replication`) is an application. A wheel carries it under `raftlog/_server`; in a
checkout it lies beside `raftlog`. Either way it runs as a process of its own. Its path begins with that directory, and
does not have the working directory (`-P`): so a user's own `broker.py` neither breaks it nor is broken.

`pip install .` installs what the clients need; server and command line need extras (ADR 0005).
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Final

from raftlog.errors import InternalError, InvalidConfig

PACKAGES: Final[Mapping[str, tuple[str, ...]]] = {
    "server": (
        "pysyncobj",
        "uvloop",
        "prometheus_client",
        "aiokafka",
        "grpc_health",
        "grpc_reflection",
        "joserfc",
        "re2",
    ),
    "cli": ("typer", "rich"),
    "console": ("jinja2", "starlette", "uvicorn", "cryptography"),
    "prometheus": ("prometheus_client",),
    "spark": ("pyspark",),
}
"""By extra: the packages that it installs, as they are imported."""


def server_root() -> Path:
    """Return the directory that holds the package `broker`.

    Raises:
        InternalError: the packages are neither where a wheel nor where a checkout has them.
    """
    package = Path(__file__).resolve().parent
    for root in (package / "_server", package.parent):
        if (root / "broker" / "__init__.py").is_file() and (root / "raftmeta" / "__init__.py").is_file():
            return root
    raise InternalError(
        f"the server's packages are neither in {package / '_server'} nor beside {package}; install raftlog again"
    )


def server_command(*arguments: str) -> list[str]:
    """Return the command line of a server process with these arguments."""
    return [sys.executable, "-P", "-m", "broker", *arguments]


def dependent_command(*arguments: str) -> list[str]:
    """Return the command line of `raftlog.testing.dependent_process` with these arguments, for this process as parent.

    It is no `-m`: the package imports that module itself, and Python would warn of that in each log.
    """
    program = "from raftlog.testing.dependent_process import main; main()"
    return [sys.executable, "-P", "-c", program, str(os.getpid()), *arguments]


def dependent_server_command(*arguments: str) -> list[str]:
    """Return the command line of a server process that does not outlive the process that starts it."""
    return dependent_command("broker", *arguments)


def server_environment() -> dict[str, str]:
    """Return this process's environment with the server root first on Python's path.

    It omits RAFTLOG_BOOTSTRAP, a setting of clients that a server would refuse, and silences gRPC's own log lines
    unless GRPC_VERBOSITY asks for more than errors.

    Raises:
        InvalidConfig: a package of the extra `server` is not installed.
    """
    missing = missing_from("server")
    if missing is not None:
        raise InvalidConfig(needs("a raftlog server", missing, "server"))
    environment = dict(os.environ)
    environment.pop("RAFTLOG_BOOTSTRAP", None)
    if environment.get("GRPC_VERBOSITY", "ERROR") == "ERROR":  # gRPC sets ERROR itself when it is imported
        environment["GRPC_VERBOSITY"] = "NONE"
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(server_root()), *([earlier] if earlier else [])])
    return environment


def missing_from(extra: str) -> str | None:
    """Return a package of this extra that is not installed, None if all are."""
    return next((package for package in PACKAGES[extra] if find_spec(package) is None), None)


def is_of(error: ModuleNotFoundError, extra: str) -> bool:
    """Return whether this import failed because a package of the extra is not installed."""
    return (error.name or "").partition(".")[0] in PACKAGES[extra]


def needs(what: str, package: str | None, *extras: str) -> str:
    """Return the message that `what` needs a package, and how to install it."""
    return f"{what} needs the package {package}, which is not installed; install it with {install(*extras)}"


def install(*extras: str) -> str:
    """Return the commands that install extras: raftlog is on no index, so from a checkout or a wheel."""
    named = ",".join(extras)
    return f"pip install '.[{named}]' in the checkout, or pip install 'raftlog[{named}] @ file:///WHEEL' of its wheel"


class _WithoutPandas(MetaPathFinder):
    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> None:
        if name == "pandas":
            raise ModuleNotFoundError("this program does not use pandas", name=name)


def keep_pandas_out() -> None:
    """Keep pandas out of this process, for programs of raftlog's own.

    Where it is installed, the first call of `pyarrow.array` would import it: a second of CPU time, and 36 MB.
    """
    sys.meta_path.insert(0, _WithoutPandas())


# The memory of a process

TRIM_THRESHOLD: Final = -1
"""Free bytes at the end of a heap, beyond which they go back to the system."""
MMAP_THRESHOLD: Final = -3
"""Blocks of so many bytes have mappings of their own, and go back to the system when they are freed."""
ARENA_MAX: Final = -8
"""The number of heaps; by default threads have heaps of their own."""


def set_malloc_options(options: Mapping[int, int]) -> None:
    """Set options of glibc's `mallopt(3)`, by number, for a process of its own; other C libraries stay as they are."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        for option, value in options.items():
            mallopt(option, value)


def give_memory_back() -> None:
    """Give free memory between blocks in use back to the system; by default glibc does so only at the heap's end."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _MallInfo2(ctypes.Structure):
    """glibc's `struct mallinfo2` (mallinfo(3))."""

    _fields_ = [
        (name, ctypes.c_size_t)
        for name in (
            ["arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"]
        )
    ]


def allocated_bytes() -> int:
    """Return how much of glibc's memory is in use in this process, 0 with other C libraries and before glibc 2.33.

    Small objects of Python's are not in it: they have memory of their own.
    """
    mallinfo2 = getattr(ctypes.CDLL(None), "mallinfo2", None)
    if mallinfo2 is None:
        return 0
    mallinfo2.restype = _MallInfo2
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)
