"""Generates `raftlog/v1` from `proto/`: `./dev proto`. With `--release` it also records the released contract."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tools import contract

ROOT = Path(__file__).resolve().parent.parent
_INIT = (
    '"""Generated protobuf and gRPC code of the wire contract `raftlog.v1`; `./dev proto` writes it from `proto/`."""\n'
)
_PACKAGE = Path("raftlog") / "v1"


def generate(target: Path) -> None:
    """Write the generated package under `target`/raftlog/v1.

    A file without services gets no `_pb2_grpc` module: it would be empty.

    Raises:
        subprocess.CalledProcessError: protoc refused a file, with the reason on stderr.
    """
    sources = sorted((ROOT / "proto" / _PACKAGE).glob("*.proto"))
    with_services = {source for source in sources if "\nservice " in source.read_text()}
    protoc = [sys.executable, "-P", "-m", "grpc_tools.protoc", f"-I{ROOT / 'proto'}"]
    target.mkdir(parents=True, exist_ok=True)
    subprocess.run([*protoc, f"--python_out={target}", f"--mypy_out=quiet:{target}", *map(str, sources)], check=True)
    subprocess.run(
        [
            *protoc,
            f"--grpc_python_out={target}",
            f"--mypy_grpc_out=quiet:{target}",
            *map(str, sorted(with_services)),
        ],
        check=True,
    )
    (target / _PACKAGE / "__init__.py").write_text(_INIT)


def differences(target: Path) -> list[str]:
    """Return the names of files in the checkout that differ from those under `target`."""
    fresh = {path.name: path.read_bytes() for path in (target / _PACKAGE).iterdir() if path.is_file()}
    held = {path.name: path.read_bytes() for path in (ROOT / _PACKAGE).iterdir() if path.is_file()}
    return sorted(name for name in fresh.keys() | held.keys() if fresh.get(name) != held.get(name))


def main(arguments: Sequence[str] = ()) -> None:
    """Generate the package, and replace the changed files of the checkout."""
    if list(arguments) not in ([], ["--release"]):
        raise SystemExit(f"error: proto takes --release or nothing, not {' '.join(arguments)}")
    package = ROOT / _PACKAGE
    with tempfile.TemporaryDirectory() as directory:
        target = Path(directory)
        generate(target)
        changed = differences(target)
        for name in changed:
            fresh = target / _PACKAGE / name
            if fresh.exists():
                shutil.copyfile(fresh, package / name)
            else:
                (package / name).unlink()
    print(f"{_PACKAGE}: {', '.join(changed) + ' written' if changed else 'nothing has changed'}")
    if arguments:
        contract.release()


if __name__ == "__main__":
    main(sys.argv[1:])
