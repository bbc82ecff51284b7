"""Runs a module as `__main__` in a process that dies with its parent, however the parent ends.

    python -P -m raftlog.testing.dependent_process PARENT-PID MODULE ARGUMENT...

On Linux the kernel sends SIGKILL at the parent's death, which ends even a stopped process. For the kernel, the parent
is the *thread* that started this process, so that thread must live as long as the parent process. On other systems a
thread checks twice a second whether the parent is still the same.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys
import threading
import time

_PR_SET_PDEATHSIG = 1
_POLL_S = 0.5


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


def main() -> None:
    """Tie this process to its parent, then run the module that the arguments name."""
    die_with(int(sys.argv[1]))
    module = sys.argv[2]
    sys.argv[:3] = [module]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
