"""The tree keeps its shape: which way imports run, which modules are pure cores, and what nobody may use.

Rules are checked on the `ast` of every source file, so an import inside a function counts as well. Below the rules,
each is shown to notice a planted violation.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

LAYERS = {
    "raftlog": set[str](),
    "raftmeta": {"raftlog"},
    "replication": {"raftlog"},
    "broker": {"raftlog", "raftmeta", "replication"},
    "pyspark_raftlog": {"raftlog"},
}
"""Which of the project's own packages a package may import besides itself."""
ENVIRONS = {"tests", "bench", "tools"}
"""Stand around the product; nothing in it imports them."""
DIRECTORIES = {name: name for name in LAYERS} | {"pyspark_raftlog": "spark/pyspark_raftlog"}

PURE = [
    "broker/coordinator/core.py",
    "broker/coordinator/records.py",
    "broker/groups/",
    "broker/log/batch_parts.py",
    "broker/log/compaction.py",
    "broker/log/last_offsets.py",
    "broker/log/source_batch.py",
    "broker/log/producer_entries.py",
    "broker/log/producer_state.py",
    "broker/log/transactions.py",
    "broker/transactions/",
    "raftlog/format/",
    "raftlog/_core/",
    "raftlog/_doctor/bundle.py",
    "raftlog/_doctor/checks/",
    "raftlog/_doctor/picture.py",
    "raftlog/_doctor/report.py",
    "raftmeta/acl_filters.py",
    "raftmeta/acl_index.py",
    "raftmeta/acls.py",
    "raftmeta/client_sessions.py",
    "raftmeta/credentials.py",
    "raftmeta/decide/",
    "raftmeta/elections.py",
    "raftmeta/features.py",
    "raftmeta/history.py",
    "raftmeta/image.py",
    "raftmeta/persistent_map.py",
    "raftmeta/placement.py",
    "raftmeta/quorum/controller_plan.py",
    "raftmeta/quorum/hello.py",
    "raftmeta/quorum/leases.py",
    "raftmeta/quorum/sessions.py",
    "raftmeta/replay.py",
    "raftmeta/state.py",
    "raftmeta/topic_configs.py",
    "raftmeta/user_names.py",
    "replication/",
    "spark/pyspark_raftlog/bounds.py",
    "spark/pyspark_raftlog/ranges.py",
    "spark/pyspark_raftlog/values.py",
]
"""Cores: clock, randomness, network and disk reach them through ports (directories end in a slash)."""
SHELLS = ["replication/shell/"]
"""Stand within a core's directory and are none."""
IMPURE_MODULES = {
    "asyncio",
    "concurrent",
    "grpc",
    "multiprocessing",
    "os",
    "random",
    "secrets",
    "selectors",
    "socket",
    "subprocess",
    "threading",
    "time",
}

ONLY_IN = {"pysyncobj": "raftmeta/raft/"}
"""Module → the one directory that may import it."""
NEVER_IMPORTED = {"dill", "marshal", "pickle", "shelve"}
"""Loading them runs code that the data names."""
NEVER_CALLED = {"eval", "exec", "__import__"}


def imported_modules(tree: ast.AST, path: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute module name) of every import; `path` resolves relative ones."""
    package = path.removeprefix("spark/").removesuffix("/__init__.py").removesuffix(".py").split("/")
    if not path.endswith("/__init__.py"):
        package = package[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            yield node.lineno, ".".join([*above, *([node.module] if node.module else [])])


def called_names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield (line, name) of every call of a plain name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.lineno, node.func.id


def is_within(path: str, places: list[str]) -> bool:
    """Whether `path` is one of the files or lies in one of the directories (which end in a slash)."""
    return any(path == place or (place.endswith("/") and path.startswith(place)) for place in places)


def violations(path: str, source: str) -> list[str]:
    """Return what breaks a rule in the file at `path` (relative to the checkout), as `path:line: what`."""
    tree = ast.parse(source, path)
    own = path.removeprefix("spark/").split("/")[0]
    found = []
    for line, module in imported_modules(tree, path):
        top = module.split(".")[0]
        if top in LAYERS.keys() | ENVIRONS and top != own and top not in LAYERS[own]:
            found.append(f"{path}:{line}: {own} may not import {top}")
        if is_within(path, PURE) and not is_within(path, SHELLS) and top in IMPURE_MODULES:
            found.append(f"{path}:{line}: a core may not import {top}; it comes in through a port")
        if top in ONLY_IN and not path.startswith(ONLY_IN[top]):
            found.append(f"{path}:{line}: {top} is imported only in {ONLY_IN[top]}")
        if top in NEVER_IMPORTED:
            found.append(f"{path}:{line}: nothing here is loaded with {top}")
    found += [f"{path}:{line}: nothing calls {name}" for line, name in called_names(tree) if name in NEVER_CALLED]
    return found


def source_files() -> list[str]:
    """Return every source file of the product, generated code apart."""
    return [
        path.relative_to(ROOT).as_posix()
        for directory in DIRECTORIES.values()
        for path in sorted((ROOT / directory).rglob("*.py"))
        if not path.is_relative_to(ROOT / "raftlog" / "v1")
    ]


@pytest.mark.parametrize("package", LAYERS)
def test_no_source_file_breaks_a_rule(package: str) -> None:
    prefix = DIRECTORIES[package] + "/"
    files = [path for path in source_files() if path.startswith(prefix)]
    assert files, f"no source file in {prefix}: the rules would hold for lack of anything to check"
    assert [found for path in files for found in violations(path, (ROOT / path).read_text())] == []


def test_every_declared_core_exists() -> None:
    files = source_files()
    assert [place for place in PURE + SHELLS if not any(is_within(path, [place]) for path in files)] == []


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("raftlog/_producer.py", "import broker.log"),
        ("raftlog/_producer.py", "def f():\n    from raftmeta import image"),
        ("raftlog/_producer.py", "from tests.unit import anything"),
        ("raftmeta/replay.py", "import replication"),
        ("replication/progress.py", "from raftmeta.image import MetadataImage"),
        ("replication/progress.py", "from broker import partition"),
        ("spark/pyspark_raftlog/sink.py", "import broker"),
        ("raftmeta/decide/topics.py", "import time"),
        ("raftmeta/image.py", "import os.path"),
        ("raftlog/format/batch.py", "from asyncio import sleep"),
        ("replication/isr.py", "def f():\n    import random"),
        ("replication/leader_session.py", "import asyncio"),
        ("replication/shell/service.py", "from raftmeta.quorum.config import Endpoint"),
        ("raftmeta/controller.py", "import pysyncobj"),
        ("broker/server.py", "from pysyncobj import SyncObj"),
        ("broker/server.py", "import pickle"),
        ("broker/server.py", "value = eval(text)"),
        ("broker/server.py", "module = __import__(name)"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("broker/server.py", "import os, raftmeta.decide, replication, raftlog"),
        ("raftmeta/raft/node.py", "import pysyncobj, time"),
        ("raftmeta/quorum/driver.py", "import asyncio, os\nfrom . import image"),
        ("replication/shell/fetchers.py", "import asyncio, random, grpc"),
        ("raftmeta/decide.py", "from raftmeta.image import MetadataImage\nfrom raftlog.errors import InvalidTopic"),
        ("spark/pyspark_raftlog/sink.py", "import os\nfrom . import options\nfrom raftlog import Producer"),
        ("raftlog/format/batch.py", "from .. import errors\nimport pyarrow"),
    ],
)
def test_what_is_allowed_passes(path: str, source: str) -> None:
    assert violations(path, source) == []


def test_relative_imports_are_resolved_against_the_file() -> None:
    tree = ast.parse("from .. import errors\nfrom ..types import Record\nfrom . import header")
    assert [name for _, name in imported_modules(tree, "raftlog/format/batch.py")] == [
        "raftlog",
        "raftlog.types",
        "raftlog.format",
    ]
    assert [name for _, name in imported_modules(ast.parse("from . import a"), "raftlog/__init__.py")] == ["raftlog"]
