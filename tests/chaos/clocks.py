"""Wall clocks that are off: there is no namespace for that clock, so a library is preloaded (clock.c)."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Final

from tests.chaos.host import run

LIBRARY: Final = "clock.so"
MOUNTED_AT: Final = "/chaos"


class Clocks:
    """A directory that every container mounts: the library, and a file for each node with how far its clock is off."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        directory.mkdir(parents=True)
        source = Path(__file__).with_name("clock.c")
        run("gcc", "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(directory / LIBRARY), str(source))

    def variables(self, node_id: int) -> dict[str, str]:
        """Return the environment variables of a node's process."""
        if not self._file(node_id).exists():
            self._file(node_id).write_bytes(bytes(8))
        return {
            "LD_PRELOAD": f"{MOUNTED_AT}/{LIBRARY}",
            "CHAOS_CLOCK": f"{MOUNTED_AT}/{self._file(node_id).name}",
        }

    def shift(self, node_id: int, by_s: float) -> None:
        """Put a node's clock ahead by so many seconds, or back; 0 puts it right."""
        with self._file(node_id).open("r+b") as file, mmap.mmap(file.fileno(), 8) as shared:
            shared[:] = struct.pack("=q", int(by_s * 1e9))

    def _file(self, node_id: int) -> Path:
        return self.directory / f"clock-{node_id}"
