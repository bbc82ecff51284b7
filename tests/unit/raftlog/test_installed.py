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
HEADERS = """
from raftlog._core.accumulator import Batch, PartitionQueue
from raftlog.format import Codec
batch = Batch(PartitionQueue("t", 0), (0,), 1 << 20, 0.0, 0.0)
batch.values, batch.headers, batch.timestamp_runs = [b"v", b"w"], [(("unit", b"C"), ("none", None)), None], [(0, 1)]
batch.close()
assert batch.encode(Codec.NONE, None)
"""
SORTED = """
import numpy as np, pyarrow as pa
from raftlog._core.rows import Rows, by_partition
values = pa.Array.from_buffers(pa.binary(), 2, [None, pa.py_buffer(np.arange(3, dtype=np.int32)), pa.py_buffer(b"ab")])
rows = Rows(values, None, None, None, None, 0)
assert [partition for partition, _ in by_partition(rows, np.array([1, 0], np.int32))] == [0, 1]
"""
LISTS = """
from raftlog._core.arguments import as_batches
assert as_batches([b"v", None], [None, b"k"], None, {"a": b"1"}, None)
"""
COMMAND = (
    "import raftlog.cli as cli; import pyarrow; cli.main = lambda: pyarrow.array([b'x']); cli.run()"  # its process only
)


@pytest.mark.parametrize(
    "code",
    [FEW, MANY, HEADERS, SORTED, LISTS, COMMAND],
    ids=["few records", "many records", "headers", "rows by partition", "lists", "the command"],
)
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
