"""The server process as a program."""

from __future__ import annotations

import subprocess
import sys


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
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (found.returncode, found.stdout) == (2, "")
    assert "no.such.key" in found.stderr
