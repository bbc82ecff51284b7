"""Files and pages that the documentation names are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").rglob("*.md")])
BASES = (ROOT, ROOT / "raftlog", ROOT / "spark", ROOT / "broker")
_CODE_PATH = re.compile(r"`([\w./-]+\.(?:py|proto|json|lock|md|toml))`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = [name for name in _CODE_PATH.findall(text) if "/" in name]
    missing = [name for name in named if not any((base / name).exists() for base in BASES)]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    assert not missing


def test_the_rule_finds_what_is_missing() -> None:
    assert _CODE_PATH.findall("see `broker/never_there.py`") == ["broker/never_there.py"]
    assert _LINK.findall("[a](docs/b.md)") == ["docs/b.md"]
