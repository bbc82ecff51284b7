"""Collections of garbage in a server process: each in a process of its own, since Python's collector is one."""

from __future__ import annotations

import subprocess
import sys

import pytest

from raftlog._installed import allocated_bytes

BEGIN = """
import gc, logging, sys, weakref
from broker.server import garbage as module
from broker.server.garbage import GarbageCollection

class Node:
    pass

def cycles(count):
    made = []
    for _ in range(count):
        a, b = Node(), Node()
        a.other, b.other = b, a
        made.append(a)
    return made

class Records(logging.Handler):
    def emit(self, record):
        whole.append(record)

whole, waiting = [], []
logging.getLogger("broker.server.garbage").addHandler(Records())
logging.getLogger("broker.server.garbage").setLevel(logging.INFO)

looks = 0
def soon():
    global looks
    while waiting:
        looks += 1
        waiting.pop()()

collection = GarbageCollection(waiting.append)
collection.start()
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", BEGIN + code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_what_lives_on_is_looked_at_once() -> None:
    """Else each collection of the oldest generation would take as long as there are objects."""
    run("""
longest = 0
def looked_at(phase, info):
    global longest
    if phase == "start" and info["generation"] == 2:
        longest = max(longest, sum(len(gc.get_objects(generation=each)) for each in range(3)))
gc.callbacks.append(looked_at)
made = cycles(300_000)
collection.settle()
made += cycles(50_000)
soon()
assert not whole
assert 50_000 < longest < 120_000, longest
assert gc.get_freeze_count() > 600_000
""")


def test_a_cycle_that_is_garbage_only_after_it_was_frozen_is_freed_before_memory_has_doubled() -> None:
    run("""
made = cycles(200_000)
collection.settle()
gone = [weakref.ref(each) for each in made]
made = cycles(50_000)
soon()
assert not whole and all(each() is not None for each in gone), "nothing has doubled yet"
while not whole:
    made += cycles(10_000)
    soon()
    assert len(made) < 400_000, "there must be a whole collection once the objects have doubled"
assert not any(each() is not None for each in gone)
assert whole[0].freed >= 400_000 and whole[0].kept < 1_000_000
before = gc.get_freeze_count()
made += cycles(100_000)
soon()
assert len(whole) == 1, "and the next one only after that many again"
""")


def test_what_is_frozen_and_goes_with_its_last_reference_brings_no_whole_collection() -> None:
    """Requests under way are frozen too, if a collection comes meanwhile."""
    run("""
base = cycles(300_000)
collection.settle()
for _ in range(100):
    under_way = [[each] for each in range(100_000)]
    soon()
assert looks > 5
assert not whole
""")


@pytest.mark.skipif(not allocated_bytes(), reason="it is glibc that says how much is in use")
def test_few_cycles_that_hold_much_memory_are_freed_too() -> None:
    run("""
lives_on, module.REST = cycles(300_000), 0
collection.settle()
alive = []
for _ in range(40):
    made = cycles(20)
    for each in made:
        each.buffer = b"x" * 1_000_000
    alive += map(weakref.ref, made)
    others = [[each] for each in range(100_000)]  # a collection meanwhile, which freezes them
    soon()
    del made, each
    alive = [each for each in alive if each() is not None]
    assert len(alive) < 150, "150 MB in few objects"
assert 5 < len(whole) < 25
""")
