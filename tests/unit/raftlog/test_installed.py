"""What programs of raftlog's own, and its clients, do not import where it is installed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FEW = "from raftlog.format.small_batch import encode_few; encode_few([b'k'], [b'v'], 0); encode_few(None, [b'v'], 0)"
MANY = """
from raftlog._core.accumulator import Batch, PartitionQueue
from raftlog._core.positions import table
from raftlog.format import Codec
batch = Batch(PartitionQueue("t", 0), (0,), 1 << 20, 0.0, 0.0)
batch.values, batch.keys, batch.timestamp_runs = [b"v", None] * 500, [None, b"k"] * 500, [(0, 1), (600, 2)]
batch.close()
assert batch.encode(Codec.NONE, None)
assert table([], ["events"]).num_rows == 0
"""
COMMAND = (
    "import raftlog.cli as cli; import pyarrow; cli.main = lambda: pyarrow.array([b'x']); cli.run()"  # its process only
)


@pytest.mark.parametrize("code", [FEW, MANY, COMMAND], ids=["few records", "many records", "the command"])
def test_pandas_is_not_imported(code: str) -> None:
    """The first call of `pyarrow.array` imports it: a second of CPU time, on the event loop of all clients."""
    pytest.importorskip("pandas")
    found = subprocess.run(
        [sys.executable, "-c", f"import sys\n{code}\nprint('pandas' in sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.strip() == "False"
