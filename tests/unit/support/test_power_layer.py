"""The layer that cuts power: content that small programs sync survives, and unsynced content may be gone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path
from random import Random

import pytest

from tests.support.power.disk import PoweredDisk, missing, powered

pytestmark = pytest.mark.skipif(missing() is not None, reason=str(missing()))

SEEDS = range(40)
BEGIN = """
import os, sys
def create(name, data=b"", sync=True, flags=0):
    fd = os.open("data/" + name, os.O_RDWR | os.O_CREAT | flags)
    os.write(fd, data)
    if sync:
        os.fsync(fd)
    return fd
def sync_names(path="data"):
    fd = os.open(path, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)
"""
OLD, NEW = b"o" * 3000, b"n" * 3000

Files = dict[str, bytes]


def run(directory: Path, program: str, *, lie: str = "") -> list[Files]:
    """Run a program, which is killed at its end, and return the content after a cut, for each seed."""
    disk = PoweredDisk(directory)
    program = f"{BEGIN}OLD, NEW = {OLD!r}, {NEW!r}\n{program}\nos.kill(os.getpid(), 9)"
    with powered(sync_us=0, lie=lie):
        ended = subprocess.run([sys.executable, "-SE", "-c", program], cwd=directory, stderr=subprocess.PIPE)
    assert ended.returncode == -9, ended.stderr.decode()
    found = [disk.outcome(Random(seed)).read() for seed in SEEDS]
    disk.cut(Random(SEEDS[-1]))
    paths = {path: path.is_file() for path in disk.data.rglob("*")}
    assert found[-1] == {str(path.relative_to(disk.data)): path.read_bytes() for path, file in paths.items() if file}
    return found


@pytest.fixture
def outcomes(tmp_path: Path) -> Callable[..., list[Files]]:
    """Return the content after a program and a cut, for each seed."""
    runs = count()
    return lambda program, lie="": run(tmp_path / str(next(runs)), program, lie=lie)


def only_of(data: bytes, *allowed: bytes) -> bool:
    """Whether each sector of `data` is of one of the contents at the same place."""
    return all(
        data[at : at + 512] in [each[at : at + 512][: len(data) - at] for each in allowed]
        for at in range(0, len(data), 512)
    )


Outcomes = Callable[..., list[Files]]


def test_what_is_synced_is_kept(outcomes: Outcomes) -> None:
    found = outcomes('create("a", OLD); sync_names()')
    assert found == [{"a": OLD}] * len(SEEDS)


def test_what_is_not_synced_is_lost_kept_torn_and_zeroed(outcomes: Outcomes) -> None:
    found = [each["a"] for each in outcomes('fd = create("a"); sync_names(); os.write(fd, NEW)')]
    assert b"" in found
    assert NEW in found
    assert bytes(3000) in found
    assert any(0 < len(each) < 3000 for each in found)
    assert any(each.strip(b"\0") not in (b"", NEW) for each in found), "in no power cut was a write torn"
    assert all(only_of(each, NEW, bytes(3000)) for each in found)


def test_bytes_that_were_synced_stay_when_others_are_not(outcomes: Outcomes) -> None:
    found = [each["a"] for each in outcomes('fd = create("a", OLD); sync_names(); os.write(fd, NEW)')]
    assert all(each.startswith(OLD) for each in found)
    assert len({len(each) for each in found}) > 2


def test_a_file_that_is_overwritten_is_old_or_new_in_each_sector(outcomes: Outcomes) -> None:
    found = [each["a"] for each in outcomes('fd = create("a", OLD); sync_names(); os.pwrite(fd, NEW, 0)')]
    assert all(len(each) == 3000 and only_of(each, OLD, NEW) for each in found)
    assert {OLD, NEW} < set(found)


def test_a_sync_counts_for_every_descriptor_and_process(outcomes: Outcomes) -> None:
    program = """
fd = create("a", OLD, sync=False)
sync_names()
twin = os.dup(fd)
if os.fork() == 0:
    os.write(os.open("data/a", os.O_WRONLY | os.O_APPEND), NEW)
    os._exit(0)
os.wait()
os.fdatasync(twin)
os.write(fd, b"x")
"""
    found = [each["a"] for each in outcomes(program)]
    assert {len(each) for each in found} == {6000}
    assert all(each in (OLD + NEW, OLD + b"x" + NEW[1:]) for each in found), (
        "the synced bytes must be kept, with or without the last write, which went behind the old ones"
    )
    assert len(set(found)) == 2


def test_appends_go_to_the_end(outcomes: Outcomes) -> None:
    program = """
fd = create("a", OLD, flags=os.O_APPEND)
sync_names()
os.pwritev(os.open("data/a", os.O_RDWR), [b"1" * 512, b"2" * 512], 3072)
os.lseek(fd, 0, 0)
os.write(fd, NEW)
"""
    found = [each["a"] for each in outcomes(program)]
    whole = OLD + bytes(72) + b"1" * 512 + b"2" * 512 + NEW
    assert all(each.startswith(OLD) and only_of(each, whole, OLD + bytes(10_000)) for each in found)
    assert whole in found
    assert OLD in found


def test_a_truncation_may_be_undone_and_nothing_mixes_across_it(outcomes: Outcomes) -> None:
    program = 'fd = create("a", OLD + OLD); sync_names(); os.truncate("data/a", 100); os.pwrite(fd, NEW, 100)'
    found = [each["a"] for each in outcomes(program)]
    assert OLD + OLD in found
    for each in found:
        assert each == OLD + OLD or (each.startswith(OLD[:100]) and b"o" not in each[100:] and len(each) <= 3100)
    assert OLD[:100] + NEW in found
    kept = outcomes('fd = create("a", OLD); sync_names(); os.ftruncate(fd, 100); os.fsync(fd)')
    assert kept == [{"a": OLD[:100]}] * len(SEEDS)


def test_a_file_that_is_opened_anew_may_be_what_it_was(outcomes: Outcomes) -> None:
    program = 'create("a", OLD); sync_names(); open("data/a", "wb", buffering=0).write(b"short")'
    found = [each["a"] for each in outcomes(program)]
    assert set(found) >= {OLD, b"short", b""}
    assert set(found) <= {OLD, b"short", b"", bytes(5)}


def test_space_that_is_allocated_is_zeros(outcomes: Outcomes) -> None:
    program = 'fd = create("a", OLD); sync_names(); os.posix_fallocate(fd, 0, 8192); os.pwrite(fd, NEW, 3000)'
    found = [each["a"] for each in outcomes(program)]
    assert all(each.startswith(OLD) and only_of(each, OLD + NEW + bytes(2192), OLD + bytes(5192)) for each in found)
    assert {len(each) for each in found} >= {3000, 8192}


def test_a_name_needs_its_directory_synced(outcomes: Outcomes) -> None:
    found = outcomes('create("a", OLD)')
    assert {} in found
    assert {"a": OLD} in found
    assert all(each in ({}, {"a": OLD}) for each in found)


def test_a_rename_may_be_undone_and_is_whole(outcomes: Outcomes) -> None:
    program = 'create("a", OLD); create("b", NEW); sync_names(); os.rename("data/b", "data/a")'
    found = outcomes(program)
    assert {"a": NEW} in found
    assert {"a": OLD, "b": NEW} in found
    assert all(each in ({"a": NEW}, {"a": OLD, "b": NEW}) for each in found)
    assert outcomes(program + "; sync_names()") == [{"a": NEW}] * len(SEEDS)


def test_a_rename_may_come_before_the_bytes(outcomes: Outcomes) -> None:
    program = (
        'create("a", OLD); sync_names(); create("b", NEW, sync=False); os.replace("data/b", "data/a"); sync_names()'
    )
    found = [each["a"] for each in outcomes(program)]
    assert NEW in found
    assert b"" in found
    assert OLD not in found


def test_what_is_removed_may_be_back(outcomes: Outcomes) -> None:
    found = outcomes('create("a", OLD); sync_names(); os.unlink("data/a")')
    assert {} in found
    assert {"a": OLD} in found
    assert outcomes('create("a", OLD); sync_names(); os.unlink("data/a"); sync_names()') == [{}] * len(SEEDS)


def test_directories_are_made_moved_and_removed(outcomes: Outcomes) -> None:
    program = """
os.makedirs("data/d/e")
sync_names(), sync_names("data/d")
create("d/e/f", OLD)
sync_names("data/d/e")
os.rename("data/d", "data/gone")
"""
    before, after = {"d/e/f": OLD}, {"gone/e/f": OLD}
    found = outcomes(program)
    assert before in found
    assert after in found
    assert all(each in (before, after) for each in found)
    removal = program + 'os.unlink("data/gone/e/f"); os.rmdir("data/gone/e"); sync_names("data/gone"); sync_names()'
    assert outcomes(removal) == [{}] * len(SEEDS)
    found = outcomes('os.mkdir("data/d"); create("d/f", OLD); sync_names("data/d")')
    assert {} in found, "in some power cut the directory must be gone, as its name was not synced"
    assert {"d/f": OLD} in found


def test_a_lie_syncs_nothing(outcomes: Outcomes) -> None:
    program = 'os.mkdir("data/d"); fd = create("a.log"); create("d/b.log", OLD); create("c", OLD); sync_names()'
    program += '; sync_names("data/d"); os.write(fd, NEW); os.fsync(fd)'
    found = outcomes(program, lie="*.log")
    assert {each["c"] for each in found} == {OLD}
    assert any(each["d/b.log"] != OLD for each in found)
    assert any(each["a.log"] != NEW for each in found)
    assert any(len(each) < 4 for each in outcomes(program, lie="."))


def test_a_kill_alone_loses_nothing_and_the_next_process_goes_on(tmp_path: Path) -> None:
    """Processes are killed in the middle of changes, and every other time the power is cut."""
    program = f"""{BEGIN}
import random, threading
def work(number):
    chance = random.Random(number + os.getpid())
    while True:
        name = f"data/{{number}}-{{chance.randrange(4)}}"
        what = chance.randrange(5)
        try:
            if what == 0:
                os.unlink(name)
            elif what == 1:
                os.rename(name, f"data/{{number}}-{{chance.randrange(4)}}")
            elif what == 2:
                os.truncate(name, chance.randrange(2000))
            else:
                fd = os.open(name, os.O_RDWR | os.O_CREAT)
                os.pwrite(fd, b"x" * chance.randrange(3000), chance.randrange(3000))
                if what == 3:
                    os.fsync(fd)
                os.close(fd)
        except FileNotFoundError:
            pass
for number in range(3):
    threading.Thread(target=work, args=(number,), daemon=True).start()
print("begun", flush=True)
threading.Event().wait()
"""
    disk = PoweredDisk(tmp_path)
    chance = Random(1)
    for number in range(10):
        with powered(sync_us=0):
            process = subprocess.Popen([sys.executable, "-SE", "-c", program], cwd=tmp_path, stdout=subprocess.PIPE)
        assert process.stdout is not None
        with process.stdout:
            process.stdout.readline()
            try:
                process.wait(chance.uniform(0.005, 0.03))
            except subprocess.TimeoutExpired:
                process.kill()
            assert process.wait() == -9
        before = {path.name: path.read_bytes() for path in disk.data.iterdir()}
        if number % 2:
            disk.cut(chance)
        else:
            disk.settle()
            assert before == {path.name: path.read_bytes() for path in disk.data.iterdir()}


def test_c_programs_are_seen_and_stdio_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "program.c"
    source.write_text("""
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
int main(int count, char **arguments) {
    int fd = creat("data/a", 0644), directory = open("data", O_RDONLY);
    if (write(fd, "kept", 4) != 4 || fsync(fd) || fsync(directory)) return 1;
    if (!strcmp(arguments[1], "stdio")) {
        FILE *file = fopen("data/a", "a");
        fputs("unseen", file);
        fclose(file);
    } else if (!strcmp(arguments[1], "map")) {
        int both = open("data/a", O_RDWR);
        if (mmap(NULL, 4, PROT_READ | PROT_WRITE, MAP_SHARED, both, 0) == MAP_FAILED) return 1;
    } else if (pwrite(dup(fd), "lost", 4, 4) != 4)
        return 1;
    return 0;
}
""")
    subprocess.run(["gcc", "-O2", "-o", str(tmp_path / "program"), str(source)], check=True)

    def end(how: str) -> tuple[int, PoweredDisk]:
        disk = PoweredDisk(tmp_path / how)
        with powered():
            return subprocess.run(
                [tmp_path / "program", how], cwd=tmp_path / how, stderr=subprocess.DEVNULL
            ).returncode, disk

    code, disk = end("plain")
    assert code == 0
    assert {disk.outcome(Random(seed)).read()["a"] for seed in SEEDS} == {b"kept", b"keptlost", b"kept\0\0\0\0"}
    code, disk = end("stdio")
    with pytest.raises(AssertionError, match="the recording layer missed writes"):
        disk.cut(Random(0))
    code, _ = end("map")
    assert code == -6, "a mapping that the layer does not record must be refused"
