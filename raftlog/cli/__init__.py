"""The command `raftlog`. It does nothing that a program could not do with the public SDK."""

from raftlog.cli.app import main

__all__ = ["main"]
