"""Compares the flights that were read with the ones that were sent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from rich.console import Console

from raftlog_demo.flights import NUMBER, checksum, from_json


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of the comparison."""

    sent: int
    received: int
    missing: int
    """Flights that did not come back."""
    repeated: int
    """Repeated records: those of a flight after its first one."""
    unknown: int
    """Records with a number that no flight has."""
    sent_checksum: str
    received_checksum: str
    """The checksum of the flights that came back, each counted once."""

    @property
    def is_complete(self) -> bool:
        """Whether every flight, and nothing else, came back once and unchanged."""
        return self.missing == self.repeated == self.unknown == 0 and self.sent_checksum == self.received_checksum

    def print(self, console: Console) -> None:
        """Print the result."""
        console.print(f"\n  sent      {self.sent:>9,} records, checksum {self.sent_checksum[:16]}")
        console.print(
            f"  received  {self.received:>9,} records, checksum {self.received_checksum[:16]}, each flight once"
        )
        console.print(f"  missing {self.missing:,}, repeated {self.repeated:,}, unknown {self.unknown:,}")
        if not self.is_complete:
            console.print("\n[bold red]The records that came back differ from those sent.[/bold red]")
        else:
            console.print(
                "\n[bold green]Every record came back exactly once and unchanged: none is missing, none is "
                "doubled.[/bold green]\nTasks stage their records; one decision commits a whole batch and remembers "
                "its number. Stages of a dead driver are aborted, and a batch that it had committed would be "
                "recognized."
            )


def compare(flights: pa.Table, sent_checksum: str, records: pa.Table) -> Verdict:
    """Compare the flights with the records' values, whatever the records' order."""
    received = from_json(records["value"], flights.schema)
    numbers = received[NUMBER].to_numpy()
    known = (numbers >= 0) & (numbers < flights.num_rows)
    counts = np.bincount(numbers[known], minlength=flights.num_rows)
    _, first_rows = np.unique(numbers, return_index=True)
    return Verdict(
        sent=flights.num_rows,
        received=received.num_rows,
        missing=int((counts == 0).sum()),
        repeated=int(np.maximum(counts - 1, 0).sum()),
        unknown=int((~known).sum()),
        sent_checksum=sent_checksum,
        received_checksum=checksum(received.take(first_rows)),
    )
