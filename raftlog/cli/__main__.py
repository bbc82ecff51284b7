"""`python -m raftlog.cli`: the command where the script `raftlog` is not on the path."""

from raftlog.cli import run

run()
