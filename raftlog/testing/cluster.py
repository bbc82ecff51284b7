"""A cluster of server processes as a context manager."""

from __future__ import annotations

import contextlib
import secrets
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType

from raftlog.errors import InvalidConfig
from raftlog.testing.server_process import ConfigValue, ServerFailed, ServerProcess

_STOP_TIMEOUT_S = 20.0


class Cluster:
    """Real server processes on loopback, each with its own data; they end with this process at the latest.

    Args:
        nodes: how many servers. More than one needs the metadata quorum, which is not there yet.
        directory: where configurations, logs and data go; it stays. None: a temporary directory, made by the first
            start, that goes. One cluster at a time may run in a directory.
        port: of the first server; 0 picks a free one. A server keeps its port over restarts.
        start_timeout_s: how long a server may take until it serves.
        config: server keys as the configuration file has them (`{"log.segment.bytes": 1048576}`).
        **more_config: the same with underscores (`log_segment_bytes=1048576`).

    Raises:
        InvalidConfig: `nodes` is not 1.
        ServerFailed: a server did not come up, or another cluster runs in the directory (`start`, or entering the
            context).
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        directory: str | Path | None = None,
        port: int = 0,
        start_timeout_s: float = 30.0,
        config: Mapping[str, ConfigValue] | None = None,
        **more_config: ConfigValue,
    ) -> None:
        if nodes != 1:
            raise InvalidConfig(
                f"nodes={nodes}: a cluster of several servers needs the metadata quorum, which this version does not "
                "have yet; use nodes=1"
            )
        merged = {**(config or {}), **{key.replace("_", "."): value for key, value in more_config.items()}}
        self._temporary = directory is None
        temporary = Path(tempfile.gettempdir()) / f"raftlog-{secrets.token_hex(8)}"
        self.directory = (temporary if directory is None else Path(directory)).resolve()
        self._start_timeout_s = start_timeout_s
        self._servers = {
            node_id: ServerProcess(node_id, self.directory / f"node-{node_id}", merged, port if node_id == 1 else 0)
            for node_id in range(1, nodes + 1)
        }

    def __enter__(self) -> Cluster:
        try:
            for node_id in self._servers:
                self.start(node_id)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop every server; one that does not stop by itself is killed. Deletes a temporary directory."""
        for server in self._servers.values():
            if server.is_running:
                with contextlib.suppress(ServerFailed):
                    server.stop(_STOP_TIMEOUT_S)
            server.release()
        if self._temporary:
            shutil.rmtree(self.directory, ignore_errors=True)

    @property
    def bootstrap(self) -> str:
        """Addresses for clients, as `host:port` with commas between."""
        return ",".join(f"127.0.0.1:{server.port}" for server in self._servers.values())

    @property
    def node_ids(self) -> list[int]:
        """The ids of all servers, running or not."""
        return list(self._servers)

    def start(self, node_id: int) -> None:
        """Start a server that is stopped and return when it serves; its data and its port are those it had."""
        server = self._server(node_id)
        if self._temporary and not self.directory.exists():
            self.directory.mkdir(mode=0o700)
        server.start(self._start_timeout_s)

    def stop(self, node_id: int) -> None:
        """Stop a server cleanly (SIGTERM)."""
        self._server(node_id).stop(_STOP_TIMEOUT_S)

    def kill(self, node_id: int) -> None:
        """Kill a server (SIGKILL)."""
        self._server(node_id).kill()

    def pause(self, node_id: int) -> None:
        """Freeze a server (SIGSTOP)."""
        self._server(node_id).pause()

    def resume(self, node_id: int) -> None:
        """Let a frozen server go on (SIGCONT)."""
        self._server(node_id).resume()

    def pid(self, node_id: int) -> int:
        """Return the process id of a running server."""
        return self._server(node_id).pid

    def is_running(self, node_id: int) -> bool:
        """Whether a server's process is there; a paused one is."""
        return self._server(node_id).is_running

    def log_dir(self, node_id: int) -> Path:
        """Return the directory with a server's partitions (its `log.dirs`)."""
        return self._server(node_id).data_directory

    def log_tail(self, node_id: int) -> str:
        """Return the last lines that a server logged since it was started last."""
        return self._server(node_id).log_tail()

    def ending(self, node_id: int) -> str | None:
        """Return how a server ended, `with exit code 1` or `by SIGKILL`; None for one that runs or never did."""
        return self._server(node_id).ending

    def _server(self, node_id: int) -> ServerProcess:
        try:
            return self._servers[node_id]
        except KeyError:
            raise InvalidConfig(
                f"there is no server {node_id}; this cluster has {', '.join(map(str, self._servers))}"
            ) from None
