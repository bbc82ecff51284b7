"""The tree keeps its shape: which way imports run, which modules are pure cores, and what no module may use.

Rules are checked on the `ast` of every source file, so an import inside a function counts as well. Below the rules,
each is shown to notice a planted violation.
"""

from __future__ import annotations

import ast
from collections import Counter
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
    "broker/coordinator/groups/",
    "broker/log/compaction.py",
    "broker/log/producer_state.py",
    "broker/log/transactions.py",
    "broker/quotas/client_quotas.py",
    "broker/coordinator/transactions/",
    "broker/coordinator/user_bound.py",
    "raftlog/format/",
    "raftlog/_core/",
    "raftlog/_doctor/bundle.py",
    "raftlog/_doctor/checks/",
    "raftlog/_doctor/picture.py",
    "raftlog/_doctor/report.py",
    "raftmeta/state.py",
    "raftmeta/credentials.py",
    "raftmeta/decide/",
    "raftmeta/elections.py",
    "raftmeta/features.py",
    "raftmeta/image.py",
    "raftmeta/decide/topics.py",
    "raftmeta/quorum/controller_plan.py",
    "raftmeta/quorum/hello.py",
    "raftmeta/quorum/sessions.py",
    "raftmeta/quotas.py",
    "raftmeta/replay.py",
    "raftmeta/topic_configs.py",
    "replication/",
    "spark/pyspark_raftlog/ranges.py",
    "spark/pyspark_raftlog/values.py",
]
"""Cores: clock, randomness, network and disk reach them through ports (directories end in a slash)."""
SHELLS = [
    "replication/shell/",
    "broker/coordinator/groups/coordinators.py",
    "broker/coordinator/transactions/coordinators.py",
    "broker/coordinator/transactions/marker_links.py",
    "broker/coordinator/transactions/marker_sender.py",
    "broker/coordinator/transactions/producer_ids.py",
    "broker/coordinator/transactions/verifier.py",
]
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
OPENS_CHANNELS = "raftlog/_client/security.py"
"""The one module that calls gRPC's functions for it, with the options that every channel has."""
CHANNEL_FUNCTIONS = {"insecure_channel", "secure_channel"}


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
    found += [
        f"{path}:{node.lineno}: channels are opened by {OPENS_CHANNELS}, as `dial` does"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and node.attr in CHANNEL_FUNCTIONS and path != OPENS_CHANNELS
    ]
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
    assert files, f"no source file in {prefix}, so that the rules would check nothing"
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
        ("broker/server/server.py", "from pysyncobj import SyncObj"),
        ("broker/server/server.py", "import pickle"),
        ("broker/server/server.py", "value = eval(text)"),
        ("broker/server/server.py", "module = __import__(name)"),
        ("broker/server/server.py", "channel = grpc.aio.insecure_channel(address)"),
    ],
)
def test_a_planted_violation_is_found(path: str, source: str) -> None:
    assert len(violations(path, source)) == 1


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("broker/server/server.py", "import os, raftmeta.decide, replication, raftlog"),
        ("raftmeta/raft/node.py", "import pysyncobj, time"),
        ("raftmeta/quorum/driver.py", "import asyncio, os\nfrom . import image"),
        ("replication/shell/fetchers.py", "import asyncio, random, grpc"),
        ("raftmeta/decide.py", "from raftmeta.image import MetadataImage\nfrom raftlog.errors import InvalidTopic"),
        ("spark/pyspark_raftlog/sink.py", "import os\nfrom . import options\nfrom raftlog import Producer"),
        ("raftlog/format/batch.py", "from .. import errors\nimport pyarrow"),
        ("raftlog/_client/security.py", "channel = grpc.secure_channel(address, credentials)"),
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


# The shape of the rooms
MOST_MODULES = 15
"""In one package, beside its `__init__`."""
DEEPEST_INHERITANCE = 2
"""Classes of the product in one line, a class and its base; exceptions are a tree of their own."""
SHORTEST_WITH_ONE_IMPORTER = 80
"""Lines: a shorter module that only one other imports is a part of that one."""
ENTRY_POINTS = ("__init__.py", "__main__.py")


def module_name(path: str) -> str:
    """Return the dotted name of the file at `path`."""
    return path.removeprefix("spark/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def imports_of(sources: dict[str, str]) -> dict[str, set[str]]:
    """Return, for each path, the paths that it imports from; imports for types and within functions count."""
    files = {module_name(path): path for path in sources}
    found: dict[str, set[str]] = {}
    for path, source in sources.items():
        names = set()
        for node in ast.walk(ast.parse(source, path)):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                submodules = {f"{node.module}.{alias.name}" for alias in node.names}
                names |= submodules & files.keys() or {node.module}
        found[path] = {files[name] for name in names & files.keys()} - {path}
    return found


def circles(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of files that import one another, each sorted (Tarjan's strongly connected components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(path: str) -> None:
        index[path] = low[path] = len(index)
        stack.append(path)
        for other in sorted(imports[path]):
            if other not in index:
                visit(other)
                low[path] = min(low[path], low[other])
            elif other in stack:
                low[path] = min(low[path], index[other])
        if low[path] == index[path]:
            members = stack[stack.index(path) :]
            del stack[stack.index(path) :]
            if len(members) > 1:
                found.append(sorted(members))

    for path in sorted(imports):
        if path not in index:
            visit(path)
    return found


def lines_of_inheritance(sources: dict[str, str]) -> list[list[str]]:
    """Return every class with its bases up to the last that is the product's own, exceptions left out."""
    bases: dict[str, list[str]] = {}
    for path, source in sources.items():
        for node in ast.walk(ast.parse(source, path)):
            if isinstance(node, ast.ClassDef):
                names = [each.value if isinstance(each, ast.Subscript) else each for each in node.bases]
                bases[node.name] = [each.id for each in names if isinstance(each, ast.Name)]

    def line(name: str, below: tuple[str, ...] = ()) -> list[str]:
        above = [line(base, (*below, name)) for base in bases.get(name, ()) if base not in below]
        return [name, *max(above, key=len, default=[])]

    lines = [line(name) for name in bases]
    return [
        [name for name in each if name in bases] for each in lines if each[-1] not in ("Exception", "BaseException")
    ]


def crowded(paths: list[str]) -> list[str]:
    """Return the packages that hold too many modules."""
    modules = Counter(path.rpartition("/")[0] for path in paths if not path.endswith(ENTRY_POINTS))
    return [f"{package}: {count} modules" for package, count in sorted(modules.items()) if count > MOST_MODULES]


def crumbs(sources: dict[str, str], imports: dict[str, set[str]]) -> list[str]:
    """Return the short modules that a single other one imports."""
    importers = Counter(path for imported in imports.values() for path in imported)
    return [
        f"{path}: {lines} lines, one importer"
        for path, source in sorted(sources.items())
        if importers[path] == 1
        and not path.endswith(ENTRY_POINTS)
        and (lines := source.count("\n")) < SHORTEST_WITH_ONE_IMPORTER
    ]


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return {path: (ROOT / path).read_text() for path in source_files()}


@pytest.fixture(scope="module")
def imports(sources: dict[str, str]) -> dict[str, set[str]]:
    return imports_of(sources)


def test_no_files_import_one_another(imports: dict[str, set[str]]) -> None:
    assert circles(imports) == []


def test_classes_are_composed(sources: dict[str, str]) -> None:
    deep = [each for each in lines_of_inheritance(sources) if len(each) > DEEPEST_INHERITANCE]
    assert deep == []


def test_no_package_is_crowded(sources: dict[str, str]) -> None:
    assert crowded(list(sources)) == []


def test_no_module_is_a_crumb(sources: dict[str, str], imports: dict[str, set[str]]) -> None:
    assert crumbs(sources, imports) == []


def test_broken_shapes_are_found() -> None:
    """Each rule notices what it is about, also where an import stands in a function or is for types only."""
    for_types = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from broker.a import A\n"
    assert circles(
        imports_of({"broker/a.py": "def f():\n    from broker import b\n", "broker/b.py": for_types, "broker/c.py": ""})
    ) == [["broker/a.py", "broker/b.py"]]
    chain = {"broker/a.py": "class A: ...\nclass B(A): ...\n", "broker/b.py": "class C(B[int]): ...\n"}
    assert max(lines_of_inheritance(chain), key=len) == ["C", "B", "A"]
    errors = {"raftlog/errors.py": "class A(Exception): ...\nclass B(A): ...\nclass C(B): ...\n"}
    assert lines_of_inheritance(errors) == []
    assert crowded([f"broker/{number}.py" for number in range(16)] + ["broker/__init__.py"]) == ["broker: 16 modules"]
    small = {"broker/a.py": "import broker.b\n", "broker/b.py": "X = 1\n"}
    assert crumbs(small, imports_of(small)) == ["broker/b.py: 1 lines, one importer"]
