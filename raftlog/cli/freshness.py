"""Whether what is shown is what the quorum has agreed on, or only what one broker knows."""

from __future__ import annotations

from typing import Final

import raftlog
from raftlog.cli.output import print_note
from raftlog.errors import RaftlogError, RetriableError

PATIENCE_S: Final = 4.0
"""How long the quorum is asked for an answer that misses nothing."""


def is_agreed(admin: raftlog.Admin) -> bool:
    """Ask the quorum, so that whatever this client asks next misses no change that was acknowledged before.

    Where no answer comes, say on stderr what is shown instead, and why; the command ends with exit code 1 then.
    """
    try:
        admin.describe_cluster(linearizable=True, timeout=PATIENCE_S)
    except RetriableError as error:
        known = admin.describe_cluster(timeout=PATIENCE_S)
        print_note(
            f"note: this is what {_who(admin)} knows, as of metadata offset {known.metadata_offset}, and may be out of "
            f"date: {error}"
        )
        return False
    return True


def _who(admin: raftlog.Admin) -> str:
    try:
        node = admin.describe_quorum(timeout=PATIENCE_S).answered_by
    except RaftlogError:
        node = 0
    return f"node {node}" if node > 0 else "a broker"
