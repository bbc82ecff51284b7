"""What programs of raftlog's own, and its clients, do not import where it is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

SEND = "from raftlog.format.small_batch import encode_few; encode_few([b'k'], [b'v'], 0); encode_few(None, [b'v'], 0)"
COMMAND = (
    "import raftlog.cli as cli; import pyarrow; cli.main = lambda: pyarrow.array([b'x']); cli.run()"  # its process only
)


@pytest.mark.parametrize("code", [SEND, COMMAND], ids=["few records sent", "the command"])
def test_pandas_is_not_imported(code: str) -> None:
    """The first call of `pyarrow.array` imports it: a second of CPU time, before a program's first record is sent."""
    pytest.importorskip("pandas")
    found = subprocess.run(
        [sys.executable, "-c", f"import sys; {code}; print('pandas' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
