"""The process of a console, which `raftlog console` becomes once it has read its options.

The command line takes memory for good (Typer, Pydantic, Rich: 14 MB), and Python's own allocator gives back little of
what answers about all topics take for a moment. So the command replaces its process by this one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Final, NoReturn

from raftlog._installed import keep_pandas_out
from raftlog.console.app import Server, Settings, keep_memory_small

ENVIRONMENT: Final = {"PYTHONMALLOC": "malloc"}
"""Unless it is set: glibc's allocator for small objects too, which gives free pages back (`raftlog._installed`)."""


def become(settings: Settings, host: str, port: int, certificate: str | None, key: str | None) -> NoReturn:
    """Replace this process by a console; never returns. Passwords go through a pipe, no command line shows them."""
    told = {"settings": asdict(settings), "host": host, "port": port, "certificate": certificate, "key": key}
    if sys.platform != "linux":  # where a thread may end this process with its parent, and does not outlive the change
        sys.exit(main(told))
    read, write = os.pipe()
    os.write(write, json.dumps(told, default=str).encode())
    os.close(write)
    os.set_inheritable(read, True)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, "-P", "-m", "raftlog.console", str(read)]
    os.execve(sys.executable, command, {**ENVIRONMENT, **os.environ})


def main(told: Mapping[str, Any]) -> int:
    """Serve a console until a signal; return the exit code: 0 after Ctrl-C, as that of `raftlog up`."""
    keep_memory_small()
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s: %(message)s")
    logging.getLogger("raftlog.console.audit").setLevel(logging.INFO)
    settings = Settings(**{**told["settings"], "hosts": tuple(told["settings"]["hosts"])})
    server = Server(settings, told["host"], told["port"], told["certificate"], told["key"])
    server.announce = lambda url: print(f"the console is at {url}; Ctrl-C stops it", flush=True)
    try:
        server.run()
    except KeyboardInterrupt:  # uvicorn raises the signal again once the server has stopped
        return 0
    return 0 if server.started else 1


if __name__ == "__main__":
    keep_pandas_out()
    with open(int(sys.argv[1]), "rb") as pipe:
        options = json.load(pipe)
    sys.exit(main(options))
