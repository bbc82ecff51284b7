"""Generates the awaitable clients in `raftlog/aio` from the synchronous ones: `./dev aio`.

    synchronous                                          awaitable
    self._thread.run(WORK)                               await WORK
    self.method(...) of a method that waits              await self.method(...); so with `RECEIVERS`
    a function that waits                                async def
    with X, where X is in `ASYNC_WITH` or is a client    async with X
    names in `RENAMED`                                   their counterparts
    examples in docstrings                               the `# aio-doc:` lines below the docstring, if there are any
    LINE  # sync                                         nothing; on the first line of a statement: all is left out
    LINE  # aio: CODE                                    CODE
    # aio: CODE                                          CODE

What the synchronous module defines beside its clients (`MODULES`) is imported from it. What is different in kind, and
not in spelling, is written by hand: `raftlog/_client/background.py` for threads, `raftlog/aio/_loop.py` for asyncio.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parent.parent
TARGET: Final = Path("raftlog") / "aio"
MODULES: Final = {
    "_admin": ("Admin",),
    "_producer": ("Producer",),
    "_consumer": ("GroupPart", "Consumer", "read_table"),
    "_delay_queue": ("Mover", "DelayQueue"),
}
"""Synchronous modules, in the order of their imports, and the classes and functions that are generated from each."""
RECEIVERS: Final = {
    "group": "GroupPart",
    "self._group": "GroupPart",
    "mover": "Mover",
    "self._mover": "Mover",
    "admin": "Admin",
    "producer": "Producer",
    "self._producer": "Producer",
    "consumer": "Consumer",
    "self._consumer": "Consumer",
}
"""Expressions in these modules that hold a client."""
ASYNC_WITH: Final = {"self._turn", "self._creating"}
HAND_WRITTEN: Final = {
    "Client": "raftlog.aio._loop",
    "Turn": "raftlog.aio._loop",
    "Alarm": "raftlog.aio._loop",
    "told": "raftlog.aio._loop",
    "wait_all": "raftlog.aio._loop",
    "get_ident": "raftlog.aio._loop",
    "Lock": "asyncio",
    "Event": "asyncio",
}
"""Names whose counterpart has the same name in another module."""
WAITING_FUNCTIONS: Final = {"told", "wait_all"}
WAITING_METHODS: Final = {"self._data.wait"}
ALWAYS_WAITING: Final = {"__enter__", "__exit__", "__next__"}
RENAMED: Final = {
    "Delivery": "AsyncDelivery",
    "BatchDelivery": "AsyncBatchDelivery",
    "Iterator": "AsyncIterator",
    "contextmanager": "asynccontextmanager",
    "StopIteration": "StopAsyncIteration",
    "__enter__": "__aenter__",
    "__exit__": "__aexit__",
    "__iter__": "__aiter__",
    "__next__": "__anext__",
}
_THREAD_SAFETY: Final = re.compile(r"(Thread-safe|Not thread-safe)[^.]*\.")
_OF_A_LOOP: Final = "Belongs to the event loop that runs when it is first used."
_MARK: Final = re.compile(r"^(?P<indent>\s*)(?P<code>.*?)\s*# (?P<kind>sync|aio)(?:: (?P<other>.*)|$)")

Function = ast.FunctionDef | ast.AsyncFunctionDef


def generate(target: Path) -> None:
    """Write the awaitable modules into the directory `target`."""
    waiting: dict[str, set[str]] = {}
    for name, classes in MODULES.items():
        source = (ROOT / "raftlog" / f"{name}.py").read_text()
        (target / f"{name}.py").write_text(_awaitable(name, source, classes, waiting))
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", "--quiet"]
    written = [str(target / f"{name}.py") for name in MODULES]
    subprocess.run([*ruff, "check", "--select", "I,F401", "--fix", *settings, *written], check=True)
    subprocess.run([*ruff, "format", *settings, *written], check=True)


def stale() -> list[str]:
    """Return the generated modules of the checkout that differ from what the synchronous ones yield now."""
    with tempfile.TemporaryDirectory() as directory:
        generate(Path(directory))
        names = [f"{name}.py" for name in MODULES]
        return [name for name in names if (Path(directory) / name).read_text() != (ROOT / TARGET / name).read_text()]


def _awaitable(name: str, source: str, classes: tuple[str, ...], waiting: dict[str, set[str]]) -> str:
    """Return the awaitable module; add to `waiting`, by class, the methods that are coroutines in it."""
    text = _with_marks_applied(source)
    tree = ast.parse(text)
    wanted = [node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name in classes]
    for node in wanted:
        waiting[node.name] = ALWAYS_WAITING & {each.name for each in node.body if isinstance(each, Function)}
    functions = [
        (node.name, each)
        for node in wanted
        for each in (node.body if isinstance(node, ast.ClassDef) else [node])
        if isinstance(each, Function)
    ]
    grows = True
    while grows:
        grows = False
        for owner, function in functions:
            if function.name not in waiting[owner] and any(_waits(each, owner, waiting) for each in ast.walk(function)):
                waiting[owner].add(function.name)
                grows = True
    text = _edited(text, _edits(wanted, waiting))
    lines = text.splitlines()
    tree = ast.parse(text)
    parts = ["\n".join(lines[node.lineno - 1 : node.end_lineno]) for node in tree.body if _is_one_of(node, classes)]
    body = "\n\n\n".join(_with_own_docstrings(part) for part in parts)
    others = [node for node in tree.body if not _is_one_of(node, classes)]
    doc = f'"""The awaitable side of `raftlog/{name}.py`, generated from it by `./dev aio`: change that file."""'
    return f"{doc}\n\nfrom __future__ import annotations\n\n{_imports(name, others)}\n\n\n{body}\n"


def _is_one_of(node: ast.AST, classes: Iterable[str]) -> bool:
    return isinstance(node, ast.ClassDef | Function) and node.name in classes


def _with_marks_applied(source: str) -> str:
    """Replace or leave out the marked lines."""
    lines = source.splitlines()
    first_lines = {
        node.lineno: node.end_lineno or 0 for node in ast.walk(ast.parse(source)) if isinstance(node, ast.stmt)
    }
    found: list[str] = []
    skipped_to = 0
    for number, line in enumerate(lines, 1):
        if number <= skipped_to:
            continue
        mark = _MARK.match(line)
        if mark is None:
            found.append(line)
        elif mark["kind"] == "sync":
            skipped_to = first_lines.get(number, number)
        elif mark["other"]:
            found.append(mark["indent"] + mark["other"])
    return "\n".join(found) + "\n"


def _waits(node: ast.AST, owner: str, waiting: dict[str, set[str]]) -> bool:
    """Whether the awaitable side waits for the node's result."""
    match node:
        case ast.Await() | ast.AsyncWith():
            return True
        case ast.With():
            return any(_is_async_with(item.context_expr) for item in node.items)
        case ast.Call(func=ast.Name(id=name)):
            return name in WAITING_FUNCTIONS
        case ast.Call(func=ast.Attribute(value=receiver, attr=method)):
            spelled = ast.unparse(receiver)
            if f"{spelled}.{method}" in WAITING_METHODS or _runs_work(node):
                return True
            of = owner if spelled == "self" else RECEIVERS.get(spelled)
            return of is not None and method in waiting.get(of, ())
    return False


def _runs_work(call: ast.Call) -> bool:
    return (
        isinstance(call.func, ast.Attribute) and call.func.attr == "run" and "_thread" in ast.unparse(call.func.value)
    )


def _is_async_with(context: ast.expr) -> bool:
    if isinstance(context, ast.Call) and isinstance(context.func, ast.Name):
        return any(context.func.id in classes for classes in MODULES.values())
    return ast.unparse(context) in ASYNC_WITH


Edit = tuple[tuple[int, int], tuple[int, int], str]
"""From a (line, column in bytes) to another, replaced by a text."""


def _edits(classes: list[ast.ClassDef | ast.FunctionDef], waiting: dict[str, set[str]]) -> Iterator[Edit]:
    for owner in classes:
        parents = {child: node for node in ast.walk(owner) for child in ast.iter_child_nodes(node)}
        for node in ast.walk(owner):
            match node:
                case ast.FunctionDef():
                    if (node is owner or parents[node] is owner) and node.name in waiting[owner.name]:
                        yield (node.lineno, node.col_offset), (node.lineno, node.col_offset), "async "
                    if node.name in RENAMED:
                        start = node.lineno, node.col_offset + len("def ")
                        yield start, (start[0], start[1] + len(node.name)), RENAMED[node.name]
                case ast.Name(id=name) if name in RENAMED:
                    yield _start(node), _end(node), RENAMED[name]
                case ast.With() if _waits(node, owner.name, waiting):
                    yield _start(node), _start(node), "async "
                case ast.Call() if _waits(node, owner.name, waiting):
                    bare = isinstance(parents[node], ast.Attribute | ast.Subscript | ast.Compare | ast.BoolOp)
                    opening, closing = ("(await ", ")") if bare else ("await ", "")
                    if _runs_work(node):
                        (work,) = node.args
                        yield _start(node), _start(work), opening
                        yield _end(work), _end(node), closing
                    else:
                        yield _start(node), _start(node), opening
                        yield _end(node), _end(node), closing


def _start(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.lineno, node.col_offset


def _end(node: ast.expr | ast.stmt) -> tuple[int, int]:
    return node.end_lineno or 0, node.end_col_offset or 0


def _edited(text: str, edits: Iterable[Edit]) -> str:
    data = text.encode()
    begins = [0]
    for line in data.splitlines(keepends=True):
        begins.append(begins[-1] + len(line))

    def at(place: tuple[int, int]) -> int:
        return begins[place[0] - 1] + place[1]

    for start, end, new in sorted(edits, key=lambda edit: (edit[0], edit[1]), reverse=True):
        data = data[: at(start)] + new.encode() + data[at(end) :]
    return data.decode()


def _with_own_docstrings(text: str) -> str:
    """Replace the examples of docstrings by those for asyncio, and drop the comments that hold these."""
    lines = text.splitlines()
    found: list[str] = []
    docstrings = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef | Function) and ast.get_docstring(node) is not None:
            first = node.body[0]
            docstrings[first.lineno] = first.end_lineno or 0
    number = 1
    while number <= len(lines):
        if number not in docstrings:
            found.append(lines[number - 1])
            number += 1
            continue
        doc = lines[number - 1 : docstrings[number]]
        number = docstrings[number] + 1
        own = number
        while own <= len(lines) and not lines[own - 1].strip():
            own += 1
        end = own
        while end <= len(lines) and lines[end - 1].strip().startswith("# aio-doc:"):
            end += 1
        examples = [line.replace("# aio-doc: ", "", 1) for line in lines[own - 1 : end - 1]]
        number = end if examples else number
        found += _docstring(doc, examples)
    return "\n".join(found)


def _docstring(lines: list[str], examples: list[str]) -> list[str]:
    """Return a docstring without its examples; with `examples`, if there are any, before `Raises:` or at its end."""
    indent = lines[0][: len(lines[0]) - len(lines[0].lstrip())]
    inside = "\n".join(lines).strip()[3:-3].rstrip()
    paragraphs = [each for each in re.split(r"\n\s*\n", inside) if not each.lstrip().startswith(">>> ")]
    if examples:
        place = next((at for at, each in enumerate(paragraphs) if each.strip().startswith("Raises:")), len(paragraphs))
        paragraphs.insert(place, "\n".join(examples))
    for at, each in enumerate(paragraphs):
        if _THREAD_SAFETY.search(each):
            changed = _THREAD_SAFETY.sub(_OF_A_LOOP, " ".join(each.split()))
            filled = textwrap.fill(changed, 120 - len('"""'), initial_indent=indent, subsequent_indent=indent)
            paragraphs[at] = filled if at else filled.lstrip()
    text = indent + '"""' + "\n\n".join(paragraphs)
    return (text + (f"\n{indent}" if "\n" in text else "") + '"""').splitlines()


def _imports(name: str, others: list[ast.stmt]) -> str:
    """Return imports of all that the synchronous module has, and its loggers and aliases; ruff drops unused ones."""
    imports, own, for_types = ["import asyncio"], [], []
    generated = {each: module for module, classes in MODULES.items() for each in classes}
    for node in others:
        match node:
            case ast.If():  # TYPE_CHECKING
                for_types += [f"    {ast.unparse(each)}" for each in node.body]
            case ast.ImportFrom(module="__future__"):
                pass
            case ast.Import():
                imports.append(ast.unparse(node))
            case ast.ImportFrom(module=module, names=names):
                for alias in names:
                    new = RENAMED.get(alias.name, alias.name)
                    home = HAND_WRITTEN.get(new, module)
                    if new in generated and module == f"raftlog.{generated[new]}":
                        home = f"raftlog.aio.{generated[new]}"
                    imports.append(f"from {home} import {new}")
            case ast.Assign(targets=[ast.Name(id="logger" | "_time_ns")]):
                own.append(ast.unparse(node))
            case (
                ast.ClassDef(name=defined)
                | ast.FunctionDef(name=defined)
                | ast.Assign(targets=[ast.Name(id=defined)])
                | ast.AnnAssign(target=ast.Name(id=defined))
            ):
                imports.append(f"from raftlog.{name} import {defined}")
    if for_types:
        imports += ["from typing import TYPE_CHECKING", "if TYPE_CHECKING:", *for_types]
    return "\n".join(dict.fromkeys([*imports, *own]))


def main() -> None:
    """Generate the modules, and print which have changed."""
    before = stale()
    generate(ROOT / TARGET)
    print(f"raftlog/aio: {', '.join(before)} written" if before else "raftlog/aio is up to date")


if __name__ == "__main__":
    main()
