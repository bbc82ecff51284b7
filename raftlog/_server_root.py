"""Where the server's packages lie, and how a server process is started. Nothing else in `raftlog` knows.

The server (`broker`, `raftmeta`, `replication`) is an application. A wheel carries it under `raftlog/_server`, in a
checkout it lies beside `raftlog`; either way it runs as a process of its own with that directory first on its path
and without the working directory on it (`-P`), so that a user's own `broker.py` neither breaks it nor is broken.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from raftlog.errors import InternalError


def server_root() -> Path:
    """Return the directory that holds the package `broker`.

    Raises:
        InternalError: neither a wheel's layout nor a checkout's.
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


def dependent_server_command(*arguments: str) -> list[str]:
    """Return the command line of a server process that does not outlive the process that starts it."""
    return [sys.executable, "-P", "-m", "raftlog._dependent_process", str(os.getpid()), "broker", *arguments]


def server_environment() -> dict[str, str]:
    """Return this process' environment with the server root first on the path of Python.

    Without RAFTLOG_BOOTSTRAP: that is a setting of clients, and a server refuses settings that it does not know. And
    without gRPC's own lines, unless GRPC_VERBOSITY asks for more than errors: the server has words of its own.
    """
    environment = dict(os.environ)
    environment.pop("RAFTLOG_BOOTSTRAP", None)
    if environment.get("GRPC_VERBOSITY", "ERROR") == "ERROR":  # which gRPC sets itself when it is imported
        environment["GRPC_VERBOSITY"] = "NONE"
    earlier = environment.get("PYTHONPATH")
    environment["PYTHONPATH"] = os.pathsep.join([str(server_root()), *([earlier] if earlier else [])])
    return environment
