"""Loss of power for real processes: what they wrote and did not sync is gone, in one of the ways a disk allows.

    disk = PoweredDisk(directory)             # makes DIRECTORY/data and DIRECTORY/power
    with powered():                           # processes started from here on, with DIRECTORY as working directory,
        process = start(...)                  #   write below data through the layer
    process.kill()                            # only the process is gone: its machine still has what it wrote
    loss = disk.cut(random.Random(seed))      # the machine is gone: data is what its disk might have

`layer/` is preloaded into the processes. It notes each change of a file or a directory with what undoes it, and each
fsync; `journal.py` reads that, `loss.py` chooses what survives, `disk.py` makes the directory anew from it.
`cluster.py` does this to the servers of a `raftlog.testing.Cluster`.

Why a preloaded library and no file system in user space: it needs gcc and nothing else, neither a package nor a device
nor privileges, and costs a few microseconds a write. It sees what goes through libc's functions, and that is all that
the server does: `strace -f` of a server that makes topics, appends, deletes and stops shows openat, write, pwrite64,
pwritev2, fallocate, ftruncate, rename, mkdir, fsync and fdatasync below its data, all of them made by Python's `os` and
`io`; pyarrow reads and writes memory, uvloop sockets. Should that change, a cut says so: it
builds names and sizes from the journal alone and fails where the directory has others (stdio's writes and system calls
that are made directly show there), and shared writable mappings and the like abort the process at once.

What a disk may do, here:
- A file's changes since the last fsync that came after them are lost, kept, kept up to one of them, torn at sectors of
  512 bytes, kept in some sectors only, or zeros where they made the file longer. Other files are none of its business.
- A truncation is a barrier: what comes after it never mixes with what was before it.
- Names that were made, moved or removed since the directory's last fsync are as before or as after, in an order that
  the journal of a file system would keep, or each for itself. fsync of a file says nothing of its name. A rename is
  whole or was not; between two directories it is durable when both were synced.
- A fsync that has not returned has done nothing yet, or everything: chance says so as for any other change.
"""

from tests.support.power.disk import Loss, PoweredDisk, powered

__all__ = ["Loss", "PoweredDisk", "powered"]
