"""A base image out of Debian's packages, for machines that reach a Debian mirror but no container registry.

Packages are downloaded with `apt-get download` and unpacked, not configured: an interpreter, a shell and what they link
to need no configuration beyond the few files written here. That takes seconds where `debootstrap` takes a minute or
two. Needs no root.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Final

from tools.progress import Progress, StepFailed

REPOSITORY: Final = "raftlog-base"
_RECIPE: Final = 2
"""Raised with every change of what is written here, so that a base of the former kind is not taken for this one."""
_WANTED: Final = ("base-files", "libc-bin", "dash", "coreutils", "tini", "python3", "python3-venv", "libstdc++6")
_UNCONFIGURED: Final = re.compile(
    r"(c?debconf|dpkg|perl.*|libperl.*|libfile-find-rule-perl|libnumber-compare-perl|libtext-.*|gawk|mawk|original-awk"
    r"|usrmerge|usr-is-merged|install-info|debianutils|init-system-helpers|libdebian-installer.*|libnewt.*|libslang.*)$"
)
"""What only configures packages, or is one of several that would do."""
_MERGED: Final = ("bin", "sbin", "lib", "lib64")
_FILES: Final = {
    "etc/passwd": "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/nonexistent:/usr/sbin/nologin\n",
    "etc/group": "root:x:0:\nnogroup:x:65534:\n",
    "etc/nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
}


class NoBaseImage(StepFailed):
    """No registry gives a base image, and none can be made here: a matter of this machine, not of the checkout."""


def ensure(progress: Progress, docker: str) -> str:
    """Return the tag of a base image with Python, made now unless there is one of the packages' current versions.

    Raises:
        NoBaseImage: this is no Debian, or its mirror cannot be reached.
    """
    for command in ("apt-cache", "apt-get", "dpkg-deb", "tar"):
        if shutil.which(command) is None:
            raise NoBaseImage(
                f"no registry can be reached and a base image is made of Debian's packages, but {command} is missing "
                "here; name an image with Python 3.11 or newer that this engine has: ./dev image --base IMAGE"
            )
    progress.say("base image: asking which packages it is made of")
    files = _files_of(_closure())
    key = hashlib.sha256(repr((_RECIPE, _FILES, sorted(files))).encode()).hexdigest()[:12]
    tag = f"{REPOSITORY}:{key}"
    if subprocess.run([docker, "image", "inspect", tag], capture_output=True, check=False).returncode == 0:
        return tag
    progress.say(f"base image {tag} of {len(files)} Debian packages, as no registry is reached")
    with tempfile.TemporaryDirectory(prefix="raftlog-base-") as directory:
        _build(Path(directory), [name for name, _ in files], progress)
        _import(Path(directory) / "root", docker, tag)
    return tag


def _run(*command: str, cwd: Path | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoBaseImage(
            f"{' '.join(command[:3])} ... failed: {(done.stderr or done.stdout).strip()[-600:]}\n"
            "If the package lists are missing or old: apt-get update"
        )
    return done.stdout


def _closure() -> list[str]:
    """Return the packages that the wanted ones need to run."""
    leave_out = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    output = _run("apt-cache", "depends", "--recurse", *leave_out, *_WANTED)
    names = {line for line in output.splitlines() if re.match(r"[a-z0-9]", line)}
    return sorted(name for name in names if not _UNCONFIGURED.match(name) and ":" not in name)


def _files_of(names: list[str]) -> list[tuple[str, str]]:
    """Return package=version and the hash of each; packages that are only virtual are passed over."""
    policy = _run("apt-cache", "show", "--no-all-versions", *names)
    found = []
    for block in policy.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Version|SHA256): (\S+)$", block, re.MULTILINE))
        if fields.keys() >= {"Package", "Version", "SHA256"} and fields["Package"] in names:
            found.append((f"{fields['Package']}={fields['Version']}", fields["SHA256"]))
    return sorted(set(found))


def _build(directory: Path, packages: list[str], progress: Progress) -> None:
    archives, root = directory / "archives", directory / "root"
    archives.mkdir()
    root.mkdir()
    # apt drops its rights for a user of its own, who is to write here.
    directory.chmod(0o755)
    archives.chmod(0o777)
    progress.detail("downloading packages")
    _run("apt-get", "download", *packages, cwd=archives)
    for name in _MERGED:  # Debian's merged /usr: packages still ship files at both places
        (root / "usr" / name).mkdir(parents=True)
        (root / name).symlink_to(f"usr/{name}")
    for archive in sorted(archives.glob("*.deb")):
        progress.detail(f"unpacking {archive.name}")
        with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", archive], stdout=subprocess.PIPE) as unpacked:
            subprocess.run(
                ["tar", "-x", "--keep-directory-symlink", "--no-same-owner", "-C", root],
                stdin=unpacked.stdout,
                check=True,
            )
        if unpacked.returncode != 0:
            raise StepFailed(f"{archive.name} cannot be unpacked")
    for name, text in _FILES.items():
        (root / name).write_text(text)
    (root / "tmp").chmod(0o1777)
    for unwanted in ("usr/share/doc", "usr/share/man", "usr/share/locale", "usr/share/info"):
        shutil.rmtree(root / unwanted, ignore_errors=True)


def _import(root: Path, docker: str, tag: str) -> None:
    with subprocess.Popen(
        ["tar", "-c", "--owner=0", "--group=0", "--numeric-owner", "-C", root, "."], stdout=subprocess.PIPE
    ) as packed:
        done = subprocess.run(
            [docker, "import", "--change", "ENV PATH=/usr/local/bin:/usr/bin:/bin", "-", tag],
            stdin=packed.stdout,
            capture_output=True,
            text=True,
            check=False,
        )
    if packed.returncode != 0 or done.returncode != 0:
        raise StepFailed(f"docker import failed: {done.stderr.strip()}")
