"""Files to damage: the content of a directory, as bytes by path, and the damage."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from raftlog.format import LENGTH_END
from tests.fuzz.choices import Choices
from tests.support.memory_storage import MemoryStorage

Files = dict[str, bytes]
Repair = Callable[[str, bytes], bytes]
"""Makes the checksums of a file good again."""


@dataclass
class Damage:
    """The damage that was done to a directory."""

    files: Files
    touched: set[str] = field(default_factory=set)
    """Paths of files that are not as they were, there or not."""
    forged: bool = False
    """Whether checksums were made good again: what a file says is then not to be told from what was written."""
    log: list[str] = field(default_factory=list)


def damage(files: Mapping[str, bytes], choices: Choices, repair: Repair | None = None, most: int = 6) -> Damage:
    """Return a directory with up to `most` things wrong in it."""
    done = Damage(dict(files))
    for _ in range(1 + choices.below(most)):
        names = sorted(done.files)
        if not names:
            break
        name = choices.pick(names)
        _befall(done, name, names, choices)
        if repair is not None and name in done.files and choices.one_in(4):
            repaired = repair(name, done.files[name])
            if repaired != done.files[name]:
                done.files[name] = repaired
                done.forged = True
    done.touched |= {path for path in files.keys() | done.files.keys() if files.get(path) != done.files.get(path)}
    return done


def _befall(done: Damage, name: str, names: list[str], choices: Choices) -> None:
    data = done.files[name]
    kind = choices.below(13)
    at = choices.below(len(data) + 1)
    size = 1 + choices.below(1 << choices.below(14))
    what = f"{name}: "
    match kind:
        case 0 if at < len(data):
            done.files[name] = data[:at] + bytes([data[at] ^ (1 << choices.below(8))]) + data[at + 1 :]
            what += f"flipped byte {at}"
        case 1:
            done.files[name] = data[:at]
            what += f"cut at {at}"
        case 2:
            done.files[name] = data[:at] + data[at : at + size] + data[at:]
            what += f"doubled {size} at {at}"
        case 3:
            done.files[name] = data[:at] + bytes(min(size, len(data) - at)) + data[at + size :]
            what += f"zeroed {size} at {at}"
        case 4:
            done.files[name] = data + choices.pick((b"\0", b"\xff", b"A", b"\n")) * size
            what += f"extended by {size}"
        case 5:
            done.files[name] = data[:at] + data[at + size :]
            what += f"lost {size} at {at}"
        case 6:
            other = choices.pick(names)
            done.files[name], done.files[other] = done.files[other], data
            what += f"swapped with {other}"
        case 7:
            other = choices.pick(names)
            done.files[name] = done.files[other]
            what += f"replaced by {other}"
        case 8:
            del done.files[name]
            what += "removed"
        case 9:
            blob = choices.blob()
            done.files[name] = data[:at] + blob + data[at + len(blob) :]
            what += f"written over at {at}"
        case 10:  # two pieces change places
            to = choices.below(len(data) + 1)
            low, high = min(at, to), max(at, to)
            end = min(len(data), high + size)
            middle = min(low + size, high)
            done.files[name] = data[:low] + data[high:end] + data[middle:high] + data[low:middle] + data[end:]
            what += f"pieces at {low} and {high} reordered"
        case 12 if name.endswith(".log") and data:
            batches = _batches(data)
            number = choices.below(len(batches))
            kept = batches[:number] + batches[number + 1 :]
            done.files[name] = b"".join(kept if choices.one_in(2) else [*batches[: number + 1], *batches[number:]])
            what += f"lost or doubled batch {number}"
        case _:
            directory, _, file = name.rpartition("/")
            renamed = f"{directory}/{_other_name(file, choices)}"
            done.files[renamed] = done.files.pop(name)
            what += f"renamed to {renamed}"
    done.log.append(what)


def _batches(data: bytes) -> list[bytes]:
    """Return a segment in pieces, a batch each as far as lengths lead."""
    found, position = [], 0
    while position < len(data):
        end = position + LENGTH_END + int.from_bytes(data[position + 8 : position + LENGTH_END], "little")
        found.append(data[position:end])
        position = end
    return found


def _other_name(name: str, choices: Choices) -> str:
    """Return a file's name for another offset, or with another ending."""
    stem, dot, suffix = name.partition(".")
    if stem.isdigit() and choices.one_in(2):
        return f"{choices.integer(0, 10**19):020d}"[:20] + dot + suffix
    return choices.pick(
        (name + ".tmp", name + ".deleted", stem + ".log", stem + ".cleaned", stem + ".snapshot", "junk")
    )


def files_of(storage: MemoryStorage, root: str) -> Files:
    """Return all files under a directory."""
    found: Files = {}
    for name, size in storage.list_sizes(root).items():
        path = f"{root}/{name}"
        if size < 0:
            found |= files_of(storage, path)
        else:
            found[path] = bytes(storage.raw(path))
    return found


def storage_of(files: Mapping[str, bytes], *directories: str) -> MemoryStorage:
    """Return a disk with these files, and these directories even if nothing is in them."""
    storage = MemoryStorage()
    for directory in {*directories, *(path.rpartition("/")[0] for path in files)}:
        storage.make_dir(directory)
    for path, data in files.items():
        storage.open(path, create=True).write((data,), 0)
    return storage.clone()
