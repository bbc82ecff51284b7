"""Processes that end with the process that starts them, however that ends.

    main() with the arguments PARENT-PID MODULE ARGUMENT...
    main() with the arguments PARENT-PID fork-server CONTROL-FD

`raftlog._installed.dependent_command` has the command line.

The first runs a module as `__main__`. On Linux the kernel sends SIGKILL at the parent's death, which ends even a
stopped process. For the kernel, the parent is the *thread* that started this process, so that thread must live as long
as the parent process. On other systems a thread checks twice a second whether the parent is still the same.

The second is the fork server, for Linux: it imports the server once, and forks for each start. The imports are most of
what a start computes: more than a second of a core, where a fork takes some hundredths. A server is a child of the fork
server, which tells its parent the process id and later how the process ended. With the parent the fork server is
killed, and with it its children.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from raftlog._installed import dependent_command

_FORK_SERVER = "fork-server"
_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5
_PROGRAM = "broker.__main__"
_PROBLEM = -1
"""Told instead of a process id: no process could be started."""
_INT = struct.Struct("<i")
_ONLY_AT_START = ("LD_", "PYTHON", "GRPC_", "ARROW_", "MALLOC_", "MIMALLOC_", "GLIBC_", "OPENSSL_", "OPENBLAS_", "OMP_")
"""Variables that the loader and libraries read when they are loaded, by how they begin."""


class ForkFailed(Exception):
    """The fork server has ended, or could not start a process. Start the process in another way."""


class ForkedProcess:
    """A process that a fork server has started; its methods are those of `subprocess.Popen`."""

    def __init__(self, pid: int, pidfd: int, status: socket.socket) -> None:
        self.pid = pid
        self._pidfd = pidfd
        self._status = status
        self._code: int | None = None
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, or minus the number of the signal that ended the process; None while it runs."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(BlockingIOError):
                    told = self._status.recv(_INT.size, socket.MSG_DONTWAIT)
                    # Without a word the fork server was killed, and so are its children.
                    self._code = _INT.unpack(told)[0] if told else -signal.SIGKILL
                    self._close()
            return self._code

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process ends, and return what `poll` then returns.

        Raises:
            subprocess.TimeoutExpired: it runs after `timeout` seconds.
        """
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = None if deadline_s is None else deadline_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            poll = select.poll()
            with contextlib.suppress(ValueError):  # another thread has just seen the end
                poll.register(self._status, select.POLLIN)
                poll.poll(None if left_s is None else left_s * 1000)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the process has ended."""
        with self._lock:
            if self._code is None:
                with contextlib.suppress(ProcessLookupError):
                    signal.pidfd_send_signal(self._pidfd, number)

    def kill(self) -> None:
        """End the process with SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        """Ask the process to end (SIGTERM)."""
        self.send_signal(signal.SIGTERM)

    def _close(self) -> None:
        self._status.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def __del__(self) -> None:
        self._close()


class ForkServer:
    """The fork server of this process. `environment` is that of its own program.

    The thread that creates it must live as long as its servers. Its methods are not thread-safe.

    Raises:
        ForkFailed: this system has no such processes.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        try:
            os.close(os.pidfd_open(os.getpid()))  # kernels before 5.3, and some sandboxes, do not have it
        except (AttributeError, OSError) as error:
            raise ForkFailed(str(error)) from error
        self._control, theirs = socket.socketpair()
        with theirs:
            command = dependent_command(_FORK_SERVER)
            self._process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(environment),
                pass_fds=[theirs.fileno()],
                process_group=0,
            )

    def start(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        cwd: Path,
        output: int,
        modules: Sequence[str] = (),
    ) -> ForkedProcess:
        """Start a server.

        Args:
            arguments: those of its command line.
            environment: its variables.
            cwd: its working directory.
            output: the descriptor of the file for what it prints.
            modules: what it will import beyond its program; from now on the fork server has these for all.

        Raises:
            ForkFailed: it was not started.
        """
        asked = json.dumps([list(arguments), dict(environment), str(cwd), list(modules)]).encode()
        status, theirs = socket.socketpair()
        try:
            with theirs, os.fdopen(os.memfd_create("raftlog-server"), "wb") as request:
                request.write(asked)
                request.flush()
                socket.send_fds(self._control, [b"s"], [request.fileno(), output, theirs.fileno()])
            told, descriptors, _, _ = socket.recv_fds(status, _INT.size, 1)
            if not told or _INT.unpack(told)[0] == _PROBLEM:
                raise ForkFailed("the fork server could not fork" if told else "the fork server has ended")
        except (OSError, ForkFailed) as error:
            status.close()
            raise ForkFailed(str(error)) from error
        return ForkedProcess(_INT.unpack(told)[0], descriptors[0], status)

    @property
    def is_running(self) -> bool:
        """Whether the process exists."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the fork server, and with it the servers that it has started."""
        self._control.close()
        self._process.kill()
        self._process.wait()


def fixed_at_start(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a fork cannot change: the loader and libraries have read them."""
    return {key: value for key, value in environment.items() if key.startswith(_ONLY_AT_START)}


def _serve(control: socket.socket, run: Callable[[], NoReturn]) -> None:
    """Fork a server for each request, and tell how each ends, until the other end of `control` is closed."""
    running: dict[int, tuple[int, socket.socket]] = {}
    with selectors.DefaultSelector() as selector:
        selector.register(control, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is not control:
                    pid, status = running.pop(key.fd)
                    selector.unregister(key.fd)
                    os.close(key.fd)
                    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    with contextlib.suppress(OSError), status:  # nobody waits for it any more
                        status.send(_INT.pack(code))
                    continue
                message, descriptors, _, _ = socket.recv_fds(control, 1, 3)
                if not message:
                    return
                request, output, told = descriptors
                status = socket.socket(fileno=told)
                with os.fdopen(request, "rb") as file:
                    file.seek(0)
                    arguments, environment, cwd, modules = json.load(file)
                _import(modules)
                parent = os.getpid()
                tied, ties = os.pipe()
                try:
                    pid = os.fork()
                except OSError:
                    os.close(ties)
                    status.send(_INT.pack(_PROBLEM))
                    status.close()
                else:
                    if pid == 0:
                        os.close(tied)
                        for pidfd, (_, other) in running.items():
                            os.close(pidfd)
                            other.close()
                        for each in (status, selector, control):
                            each.close()
                        _become_server(parent, ties, arguments, environment, cwd, output, run)
                    os.close(ties)
                    # Wait until the child is sure to end with this process. Only then may others know its id.
                    os.read(tied, 1)
                    pidfd = os.pidfd_open(pid)
                    running[pidfd] = pid, status
                    selector.register(pidfd, selectors.EVENT_READ)
                    socket.send_fds(status, [_INT.pack(pid)], [pidfd])
                os.close(tied)
                os.close(output)


def _import(modules: Sequence[str]) -> None:
    if not all(each in sys.modules for each in modules):
        for each in modules:
            with contextlib.suppress(ImportError):  # the server that needs it says so
                importlib.import_module(each)
        gc.freeze()  # a collection would write into the pages that all servers share


def _become_server(
    parent: int,
    ties: int,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    cwd: str,
    output: int,
    run: Callable[[], NoReturn],
) -> NoReturn:
    """Turn this process, which has just been forked, into a server. `ties`: closed once it ends with its parent."""
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.close(output)
        die_with(parent)
        os.close(ties)
        os.setpgid(0, 0)
        os.environ.clear()
        os.environ.update(environment)
        os.chdir(cwd)
        sys.argv = ["broker", *arguments]
        run()
    except BaseException:
        traceback.print_exc()
    os._exit(1)


def die_with(parent_pid: int) -> None:
    """End this process with SIGKILL when the thread that started it ends, or if its parent is another one already."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
            number = ctypes.get_errno()
            raise OSError(number, f"prctl(PR_SET_PDEATHSIG): {os.strerror(number)}")
    else:
        threading.Thread(target=_poll, args=(parent_pid,), name="parent-watch", daemon=True).start()
    if os.getppid() != parent_pid:  # the parent died before prctl took effect
        os._exit(1)


def _poll(parent_pid: int) -> None:
    while os.getppid() == parent_pid:
        time.sleep(_POLL_S)
    os._exit(1)


def _fork_for(control: socket.socket) -> None:
    """Be the fork server, until the other end of `control` is closed."""
    _import([_PROGRAM])
    _serve(control, sys.modules[_PROGRAM].run)


def main() -> None:
    """Tie this process to its parent, then be the fork server, or run the module that the arguments name."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    if module == _FORK_SERVER:
        _fork_for(socket.socket(fileno=int(sys.argv[3])))
        return
    sys.argv[:3] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
