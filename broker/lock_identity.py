"""Which lock a broker holds, so that its next process can prove that it is dead.

A broker that registers while the one before it may still hold a lease has to wait until that must be over. It need not
when it holds the very lock that the other one held: then that process is gone. The same directory is not enough: a copy
has the same id, and a volume can be attached to another machine while the old process goes on in memory. What cannot be
had twice at a time is the same file, locked under the same kernel.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from pathlib import Path
from typing import Final

from broker.log.log_dir import LOCK_FILE

IDENTITY_BYTES: Final = 16
BOOT_ID: Final = Path("/proc/sys/kernel/random/boot_id")


def lock_identity(log_dir: str, directory_id: str, boot_id: Path = BOOT_ID) -> bytes:
    """Return 16 bytes that are equal for two processes only if both locked this file of this running kernel.

    Where the kernel does not say which one it is, nothing is ever equal.
    """
    try:
        kernel = boot_id.read_bytes()
        file = os.stat(Path(log_dir) / LOCK_FILE)
    except OSError:
        return secrets.token_bytes(IDENTITY_BYTES)
    text = f"{directory_id} {file.st_dev} {file.st_ino} ".encode() + kernel
    return hashlib.blake2b(text, digest_size=IDENTITY_BYTES).digest()
