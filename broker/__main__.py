"""The server process: `python -P -m broker --config FILE [--set KEY=VALUE ...] [--ready-file FILE]`.

Exit codes: 0 stopped by SIGTERM or SIGINT, 1 cannot start or run, 2 the configuration is wrong.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import logging
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

import uvloop

from broker.config.config import BrokerConfig
from broker.server.garbage import GarbageCollection
from broker.server.logging import configure_logging
from broker.server.server import NodeServer
from raftlog import __version__, _installed
from raftlog.errors import InvalidConfig, RaftlogError

logger = logging.getLogger(__name__)

EXIT_CANNOT_RUN = 1
EXIT_CONFIG = 2
SWITCH_INTERVAL_S = 0.001
"""How long a thread that computes (encoding a large snapshot) may keep the interpreter from the event loop. With
Python's 5 ms a topic creation took 10 ms meanwhile, with this 3 ms."""


TRIM_THRESHOLD_BYTES: Final = 16 << 20
"""Free memory that each of glibc's heaps keeps."""
MMAP_THRESHOLD_BYTES: Final = 4 << 20
"""Larger blocks, such as very large messages, have mappings of their own, and go back to the system when freed."""


def keep_freed_memory() -> None:
    """Have glibc keep what is freed, for the next messages, instead of giving it back to the system at once.

    Each message of a fetch is some blocks of 64 KiB and more, freed together. By default glibc gave them back, and the
    kernel cleared new pages for the next one: 450 page faults and two thirds of the server's time for each MB.
    Variables of the environment that set this (MALLOC_TRIM_THRESHOLD_, MALLOC_MMAP_THRESHOLD_, GLIBC_TUNABLES) win.
    """
    if not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        _installed.set_malloc_options(
            {_installed.TRIM_THRESHOLD: TRIM_THRESHOLD_BYTES, _installed.MMAP_THRESHOLD: MMAP_THRESHOLD_BYTES}
        )


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="raftlog server", description="Run one raftlog node.")
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with server keys (node.id, log.dirs, ...)"
    )
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="a key that wins over file and environment"
    )
    parser.add_argument(
        "--ready-file", type=Path, metavar="FILE", help="written when the node is ready: JSON with its addresses"
    )
    parser.add_argument(
        "--insecure", action="store_true", help="allow plaintext without authentication beyond loopback"
    )
    return parser.parse_args(argv)


def _flags(pairs: Sequence[str], insecure: bool) -> dict[str, str]:
    flags = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise InvalidConfig(f"--set {pair}: write KEY=VALUE")
        flags[key] = value
    if insecure:
        flags["insecure"] = "true"
    return flags


def _write_ready_file(path: Path, config: BrokerConfig, server: NodeServer) -> None:
    """Say where the node is: `bootstrap` for clients, `kafka`, `inter_node` for nodes, `metrics`; "" without one."""
    aside = path.with_suffix(".tmp")
    ready = {
        "node_id": config.node_id,
        "bootstrap": server.bootstrap,
        "kafka": server.kafka,
        "inter_node": server.inter_node,
        "metrics": server.metrics,
        "pid": os.getpid(),
    }
    aside.write_text(json.dumps(ready))
    aside.replace(path)


async def _serve(config: BrokerConfig, ready_file: Path | None) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for signal_number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signal_number, stop.set)
    stopped = asyncio.ensure_future(stop.wait())
    garbage = GarbageCollection(loop.call_soon_threadsafe)
    garbage.start()
    server = NodeServer(config)
    starting = asyncio.ensure_future(server.start())
    await asyncio.wait((stopped, starting), return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():  # it may wait for a quorum for ever
        starting.cancel()
        await asyncio.gather(starting, return_exceptions=True)
        logger.info("stopped before the node was ready")
        return
    starting.result()
    garbage.settle()
    try:
        if ready_file is not None:
            _write_ready_file(ready_file, config, server)
        failed = asyncio.ensure_future(server.failed())
        await asyncio.wait((stopped, failed), return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            await failed
        failed.cancel()
    finally:
        stopped.cancel()
        await server.stop()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a node until a signal stops it; return the exit code."""
    _installed.keep_pandas_out()
    keep_freed_memory()
    arguments = _arguments(sys.argv[1:] if argv is None else argv)
    try:
        config = BrokerConfig.load(
            file=arguments.config, environment=os.environ, flags=_flags(arguments.set, arguments.insecure)
        )
    except InvalidConfig as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    os.umask(0o077)  # also for what libraries write
    configure_logging(config.log_level, config.log_format, config.node_id)
    logger.info(
        "starting node %d, roles %s",
        config.node_id,
        ",".join(config.process_roles),
        extra={"event": "node_starting", "version": __version__},
    )
    for warning in config.warnings:
        logger.warning("%s", warning)
    try:
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        uvloop.run(_serve(config, arguments.ready_file))
    except RaftlogError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG if isinstance(error, InvalidConfig) else EXIT_CANNOT_RUN
    logger.info("node stopped", extra={"event": "node_stopped"})
    return 0


def run() -> NoReturn:
    """Run `main` as the whole process, and exit right after it, without the interpreter's own cleanup.

    The node has stopped in order by then. The cleanup would take a fifth of a second of computing, longer than the
    stop itself, and frees nothing that does not end with the process.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until `_serve` handles it: Python's own handler prints a traceback
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # `raftlog server` blocks it during the imports
    code = main()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # the reader is gone, or the stream is closed
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    run()
