"""The server process as a program."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest


def test_a_server_process_does_not_import_pandas() -> None:
    """Where it is installed, the first call of `pyarrow.array` imports it, which takes memory and time at the start."""
    code = (
        "import sys, broker.__main__ as program, pyarrow; "
        "assert program.main(['--set', 'no.such.key=1']) == program.EXIT_CONFIG; "
        "pyarrow.array([b'x']); print('pandas' in sys.modules)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_a_server_process_ends_with_its_code_and_without_the_cleanup_of_the_interpreter() -> None:
    code = (
        "import atexit, runpy, sys; atexit.register(print, 'cleaning up'); sys.argv[1:] = ['--set', 'no.such.key=1']; "
        "runpy.run_module('broker', run_name='__main__', alter_sys=True)"
    )
    # Without variables that it would refuse.
    ours = {name: value for name, value in os.environ.items() if not name.startswith("RAFTLOG_")}
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, env=ours)
    assert (found.returncode, found.stdout) == (2, "")
    assert "no.such.key" in found.stderr


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it is glibc that is told to keep freed memory")
@pytest.mark.parametrize(("setting", "keeps"), [({}, True), ({"MALLOC_TRIM_THRESHOLD_": "131072"}, False)])
def test_a_server_process_keeps_freed_memory_unless_the_environment_says_otherwise(
    setting: dict[str, str], keeps: bool
) -> None:
    """Without it, the kernel clears each page of a message anew: 25 pages for each of these blocks."""
    code = (
        "import resource, broker.__main__ as program; "
        "program.main(['--set', 'no.such.key=1']); "
        "faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt; "
        "messages = lambda count: [[bytes(100_000) for _ in range(20)] and None for _ in range(count)]; "
        "messages(5); before = faults(); messages(100); print(faults() - before)"
    )
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={**environment, **setting}
    )
    assert (int(run.stdout) < 1_000) == keeps, f"{run.stdout.strip()} page faults for 2,000 blocks"
