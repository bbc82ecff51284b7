"""One server process: its directory, its configuration file, its log, its signals."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import IO

from raftlog._installed import dependent_server_command, server_environment
from raftlog.errors import RaftlogError
from raftlog.testing.dependent_process import ForkedProcess, ForkFailed, ForkServer, fixed_at_start
from raftlog.testing.layout import private

ConfigValue = str | int | float | bool

_LOG_TAIL_LINES = 25
_READY_POLL_S = 0.01
_RECOVERING = "recovering logs"
"""A server logs this every five seconds while it recovers its logs; the rest of the line is how far it is."""
_AFTER_RECOVERING_S = 30.0
"""The least time that a server has for the rest of its start after such a line."""
_SAME_PROGRESS_MAX = 120
"""A server hangs that has logged the same progress so often; it has ten minutes for a single log."""

_KAFKA_LISTENER = "broker.kafka.listener"
"""The module that only servers with a listener for Kafka clients import."""
_FORK_SERVERS = 3
"""Servers of a cluster come from different ones, since forks of one process hash strings alike; real servers do not."""
_ENVIRONMENTS_MAX = 3
"""Of so many environments there are fork servers, if they differ in what a fork cannot change; each takes memory."""
_START = "RAFTLOG_SERVER_START"
"""The variable that says how servers start: `fork`, the default, or `exec`, each as a program of its own."""

_fork_servers: dict[tuple[int, frozenset[tuple[str, str]]], ForkServer] = {}
"""By number, and by what a fork cannot change of the environment."""
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="raftlog-server-starter")
"""A server dies with the thread that started it; this thread lives until the interpreter ends."""


def _fork_server(node_id: int, environment: Mapping[str, str]) -> ForkServer:
    """Return the fork server for a server; call it in the thread of `_starter`.

    Raises:
        ForkFailed: there is none, or none for this environment.
    """
    if os.environ.get(_START) == "exec":
        raise ForkFailed(f"{_START}=exec")
    fixed = frozenset(fixed_at_start(environment).items())
    if len({known for _, known in _fork_servers} | {fixed}) > _ENVIRONMENTS_MAX:
        raise ForkFailed("there are fork servers of too many environments already")
    key = node_id % _FORK_SERVERS, fixed
    found = _fork_servers.get(key)
    if found is None or not found.is_running:
        found = _fork_servers[key] = ForkServer(environment)
    return found


@atexit.register
def _close_fork_servers() -> None:
    for each in _fork_servers.values():
        each.close()


class ServerFailed(RaftlogError):
    """A server process did not start or stop cleanly; the message has the end of its log. It has no wire code."""


def _environment() -> dict[str, str]:
    """Return the environment of a server, without the caller's RAFTLOG_* variables, which are for other servers."""
    return {key: value for key, value in server_environment().items() if not key.startswith("RAFTLOG_")}


KAFKA_PROTOCOLS = {"plaintext": "kafka", "ssl": "kafka+ssl", "sasl_ssl": "kafka+sasl+ssl"}
"""The protocol for Kafka clients that is as secure as the other listener, by `listener.security.protocol`."""


class ServerProcess:
    """A server with its own directory: configuration, log and data stay there when the process ends.

    States: stopped -start-> running -kill/stop-> stopped; running -pause-> paused -resume-> running.
    The first start picks a free port unless `port` is set; later starts use the same one.
    From a start until the process ends, or `release`, this object holds a lock on the directory.
    """

    def __init__(
        self,
        node_id: int,
        directory: Path,
        config: Mapping[str, ConfigValue],
        port: int = 0,
        *,
        serves_clients: bool = True,
        serves_kafka: bool = False,
        outlives_cluster: bool = True,
    ) -> None:
        """`outlives_cluster`: whether the directory is still there when a message names a file of it."""
        self._outlives_cluster = outlives_cluster
        self.node_id = node_id
        self.directory = directory
        self.data_directory = directory / "data"
        self.log_file = directory / "server.log"
        self.config_file = directory / "server.toml"
        self._config = dict(config)
        self._port = port
        self._serves_clients = serves_clients
        self._serves_kafka = serves_kafka and serves_clients
        self._kafka_port = 0
        self._process: subprocess.Popen[bytes] | ForkedProcess | None = None
        self._paused = False
        self._lock: IO[str] | None = None
        self._log_begins_at = 0
        self._launched_at_s = 0.0

    def configure(self, config: Mapping[str, ConfigValue], port: int, kafka_port: int = 0) -> None:
        """Set the configuration of later starts, and the ports that are not 0."""
        self._config = dict(config)
        self._port = port or self._port
        self._kafka_port = kafka_port or self._kafka_port

    def reconfigure(self, config: Mapping[str, ConfigValue]) -> None:
        """Set further keys for later starts."""
        self._config |= config

    @property
    def port(self) -> int:
        """The port of the client listener; 0 before the first start, and without such a listener."""
        return self._port

    @property
    def kafka_port(self) -> int:
        """The port of the listener for Kafka clients; 0 before the first start, and without such a listener."""
        return self._kafka_port

    @property
    def pid(self) -> int:
        """The process id.

        Raises:
            ServerFailed: the server is not running.
        """
        return self._running().pid

    @property
    def is_running(self) -> bool:
        """Whether the process exists; a paused one does."""
        return self._process is not None and self._process.poll() is None

    @property
    def ending(self) -> str | None:
        """How the process ended: `with exit code 1`, `by SIGKILL`; None if it runs or was never started."""
        code = self._process.poll() if self._process is not None else None
        if code is None:
            return None
        return f"with exit code {code}" if code >= 0 else f"by {signal.Signals(-code).name}"

    def start(self, timeout_s: float) -> None:
        """Start the process and return when it is ready. Raises as `launch` and `wait_ready`."""
        self.launch()
        self.wait_ready(time.monotonic() + timeout_s)

    def launch(self) -> None:
        """Start the process; the caller then calls `wait_ready`.

        Raises:
            ServerFailed: it runs already, or another process has started a server in the directory.
        """
        if self.is_running:
            raise ServerFailed(f"server {self.node_id} is running already (pid {self.pid})")
        self._acquire()
        try:
            self._launch()
        except BaseException:
            self.release()
            raise

    def wait_ready(self, deadline_s: float) -> None:
        """Wait until the server is ready; `deadline_s`: on the monotonic clock.

        A server that still recovers its logs then has more time, unless it has made no progress for ten minutes.

        Raises:
            ServerFailed: it ended, or was not ready in time and was killed.
        """
        try:
            self._wait_ready(deadline_s)
        except BaseException:
            if not self.is_running:
                self.release()
            raise

    def release(self) -> None:
        """Release the lock on the directory of a server that has ended."""
        if self._lock is not None:
            self._ready_file.unlink(missing_ok=True)  # its process id will be reused
            self._lock.close()
            self._lock = None

    def _acquire(self) -> None:
        if self._lock is not None:
            return
        self.directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock = open(self.directory / "lock", "a+", opener=private)  # noqa: SIM115 # held as long as the server runs
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            owner = lock.read().strip() or "?"
            lock.close()
            raise ServerFailed(
                f"{self.directory} is in use: process {owner} runs a server there; stop it or use another directory"
            ) from None
        lock.truncate(0)
        lock.write(str(os.getpid()))
        lock.flush()
        self._lock = lock

    @property
    def _ready_file(self) -> Path:
        return self.directory / "ready.json"

    def _launch(self) -> None:
        self.data_directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._ready_file.unlink(missing_ok=True)
        self._write_config()
        self._log_begins_at = self.log_file.stat().st_size if self.log_file.exists() else 0
        arguments = ("--config", str(self.config_file), "--ready-file", str(self._ready_file))
        self._process = _starter.submit(self._spawn, arguments).result()
        self._paused = False
        self._launched_at_s = time.monotonic()

    def _wait_ready(self, deadline_s: float) -> None:
        seen = 0
        while not self._ready_file.exists():
            if not self.is_running:
                raise ServerFailed(self._describe(f"ended {self.ending} while starting"))
            if time.monotonic() > deadline_s:
                lines = self._log_since_start().splitlines()
                progress = [line.partition(_RECOVERING)[2] for line in lines if _RECOVERING in line]
                hangs = len(progress) >= _SAME_PROGRESS_MAX and len(set(progress[-_SAME_PROGRESS_MAX:])) == 1
                if len(progress) > seen and not hangs:
                    seen, deadline_s = len(progress), time.monotonic() + _AFTER_RECOVERING_S
                    continue
                waited_s = time.monotonic() - self._launched_at_s
                self.kill()
                raise ServerFailed(self._describe(f"is not ready after {waited_s:.0f} s"))
            time.sleep(_READY_POLL_S)
        if self._serves_clients:
            ready = json.loads(self._ready_file.read_bytes())
            picked, kafka_picked = (int(ready.get(key, "").rpartition(":")[2] or 0) for key in ("bootstrap", "kafka"))
            if (picked, kafka_picked) != (self._port, self._kafka_port):  # later starts use the same ports
                self._port, self._kafka_port = picked, kafka_picked
                self._write_config()

    def kill(self) -> None:
        """End the process with SIGKILL."""
        process = self._running()
        process.kill()
        process.wait()
        self.release()

    def stop(self, timeout_s: float) -> None:
        """End the process with SIGTERM, and wait for its clean shutdown. Raises as `wait_stopped`."""
        self.terminate()
        self.wait_stopped(timeout_s)

    def terminate(self) -> None:
        """Ask the process to stop (SIGTERM); the caller then calls `wait_stopped`."""
        process = self._running()
        if self._paused:
            self.resume()
        process.send_signal(signal.SIGTERM)

    def wait_stopped(self, timeout_s: float) -> None:
        """Wait until a process stops after `terminate`.

        Raises:
            ServerFailed: it was killed after `timeout_s`, or its exit code is not 0.
        """
        process = self._process
        assert process is not None, "terminate comes first"
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise ServerFailed(self._describe(f"had not stopped {timeout_s:g} s after SIGTERM")) from None
        self.release()
        if code != 0:
            raise ServerFailed(self._describe(f"ended {self.ending} after SIGTERM"))

    def pause(self) -> None:
        """Freeze the process (SIGSTOP); its connections stay open but silent."""
        self._running().send_signal(signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        """Continue a frozen process (SIGCONT)."""
        self._running().send_signal(signal.SIGCONT)
        self._paused = False

    def log_tail(self) -> str:
        """Return the last lines of the log since the last start; lines with `error:` come last."""
        lines = self._log_since_start().splitlines()
        lines.sort(key=lambda line: line.startswith("error:"))  # stable
        return "\n".join(lines[-_LOG_TAIL_LINES:])

    def _log_since_start(self) -> str:
        try:
            with self.log_file.open("rb") as log:
                log.seek(self._log_begins_at)
                return log.read().decode(errors="replace")
        except OSError:
            return ""

    def _spawn(self, arguments: Sequence[str]) -> subprocess.Popen[bytes] | ForkedProcess:
        environment = _environment()
        with open(self.log_file, "ab", opener=private) as log:
            with contextlib.suppress(ForkFailed):
                fork_server = _fork_server(self.node_id, environment)
                modules = [_KAFKA_LISTENER] if self._serves_kafka else []
                return fork_server.start(arguments, environment, self.directory, log.fileno(), modules)
            return subprocess.Popen(
                dependent_server_command(*arguments),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment,
                cwd=self.directory,
                process_group=0,  # Ctrl-C reaches only the parent, which then stops the server in order
            )

    def _running(self) -> subprocess.Popen[bytes] | ForkedProcess:
        if self._process is None or self._process.poll() is not None:
            raise ServerFailed(self._describe("is not running"))
        return self._process

    def _describe(self, what: str) -> str:
        tail = self.log_tail()
        log = f"its log, {self.log_file}," if self._outlives_cluster else "its log"
        return f"server {self.node_id} {what}; {log} " + (f"ends with:\n{tail}" if tail else "is empty")

    def _write_config(self) -> None:
        with open(self.config_file, "w", opener=private) as out:
            out.write(self._toml())

    def _toml(self) -> str:
        config: dict[str, ConfigValue] = {"node.id": self.node_id}
        if self._serves_clients:
            listeners = f"127.0.0.1:{self._port}"
            if self._serves_kafka:
                protocol = KAFKA_PROTOCOLS[str(self._config.get("listener.security.protocol", "plaintext")).lower()]
                listeners += f",{protocol}://127.0.0.1:{self._kafka_port}"
            config |= {"listeners": listeners, "log.dirs": str(self.data_directory)}
        else:
            config["metadata.log.dir"] = str(self.data_directory)
        config |= self._config
        # JSON's strings, numbers, true and false are also valid TOML.
        return "".join(f"{json.dumps(key)} = {json.dumps(value)}\n" for key, value in config.items())
