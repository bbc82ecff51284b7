"""What signals do to a command that waits for them."""

from __future__ import annotations

import subprocess
import sys

WAITS = 300
PATIENCE_S = 60
INTERRUPTED = f"""
import faulthandler, random, signal
from raftlog.cli.signals import StopFlag

faulthandler.dump_traceback_later({PATIENCE_S}, exit=True)
chance = random.Random(1)
signal.signal(signal.SIGALRM, lambda number, frame: stop.set())
for _ in range({WAITS}):
    stop = StopFlag()
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-6, 2e-5))
    while not stop.wait(0.5):
        pass
print("every wait has ended")
"""


def test_a_signal_at_any_moment_ends_the_wait() -> None:
    """Also between a look at the flag and the wait itself: with `threading.Event` one of the first never ended."""
    ran = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED], capture_output=True, text=True, check=False, timeout=2 * PATIENCE_S
    )
    assert (ran.returncode, ran.stdout, ran.stderr) == (0, "every wait has ended\n", "")
