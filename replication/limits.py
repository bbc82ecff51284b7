"""How much one request of a `Replicate` stream may ask for, so that none holds the leader's thread for long."""

from __future__ import annotations

from typing import Final

MAX_OPENS: Final = 500
"""Partitions opened in one request: some 40 KiB, and the first frame of each."""
MAX_CLOSES: Final = 2_000
MAX_ACKS: Final = 2_000
