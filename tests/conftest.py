"""Settings of every test run."""

from __future__ import annotations

from hypothesis import settings

# No test is about how long it takes: the machine may be busy with something else.
settings.register_profile("raftlog", deadline=None)
settings.load_profile("raftlog")
