"""Files and pages that the documentation names are there, and the README says the same in both languages."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
BASES = (ROOT, ROOT / "raftlog", ROOT / "spark", ROOT / "broker")
_CODE_PATH = re.compile(r"`([\w./-]+\.(?:py|proto|json|lock|md|toml))`")
_LINK = re.compile(r"\]\(([^)#:]+)\)")
_SECTION_LINK = re.compile(r"\]\(([^)#:]*)#([^)]+)\)")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page: Path) -> None:
    text = page.read_text()
    named = [name for name in _CODE_PATH.findall(text) if "/" in name]
    missing = [name for name in named if not any((base / name).exists() for base in BASES)]
    missing += [link for link in _LINK.findall(text) if not (page.parent / link).exists()]
    for link, section in _SECTION_LINK.findall(text):
        target = page.parent / link if link else page
        if not target.exists() or section not in sections(target.read_text()):
            missing.append(f"{link}#{section}")
    assert not missing


def sections(page: str) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them; of equal ones the first."""
    headings = re.findall(r"^#+ (.+)$", _ANY_FENCED.sub("", page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


def test_the_rule_finds_what_is_missing() -> None:
    assert _CODE_PATH.findall("see `broker/never_there.py`") == ["broker/never_there.py"]
    assert _LINK.findall("[a](docs/b.md)") == ["docs/b.md"]
    assert _SECTION_LINK.findall("[a](docs/b.md#one) [b](#two) [c](https://a/b#c)") == [
        ("docs/b.md", "one"),
        ("", "two"),
    ]
    assert sections("# TLS: `a`, and b\n\n```sh\n# no\n```\n## Kafka's tools\n") == {"tls-a-and-b", "kafkas-tools"}


_ANY_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_FENCED = re.compile(r"^```python\n.*?^```$", re.MULTILINE | re.DOTALL)
_INDENTED = re.compile(r"(?:^ {4}.*\n)+", re.MULTILINE)
_COMMENT = re.compile(r"(?:(?<=\s)|^)#.*")
_HEADING = re.compile(r"^(#+) ", re.MULTILINE)


def commands(page: str) -> list[str]:
    """Return the code blocks of a page, without comments and without lines that have only a comment."""
    fenced = _FENCED.findall(page)
    found = fenced + _INDENTED.findall(_FENCED.sub("", page))
    lines = ([_COMMENT.sub("", line).rstrip() for line in block.splitlines()] for block in found)
    return ["\n".join(line for line in block if line) for block in lines]


def test_the_chinese_readme_has_the_same_code_links_and_sections() -> None:
    """Its code is not run a second time: tests/integration/test_readme.py runs README.md's, and this is the same."""
    english, chinese = (ROOT.joinpath(name).read_text() for name in ("README.md", "README.zh-CN.md"))
    assert commands(chinese) == commands(english)
    assert len(commands(english)) > 7
    ours = {"README.md", "README.zh-CN.md"}
    links = [[link for link in _LINK.findall(page) if link not in ours] for page in (english, chinese)]
    assert links[1] == links[0]
    sections = [_HEADING.findall(_INDENTED.sub("", _FENCED.sub("", page))) for page in (english, chinese)]
    assert sections[1] == sections[0]
    assert "(README.zh-CN.md)" in english
    assert "(README.md)" in chinese


def test_the_comparison_sees_code_and_not_comments() -> None:
    page = "Text\n\n    run --flag  # says\n                # more\n\n```python\nx = 1  # one\n# two\ny = '#3'\n```\n"
    assert commands(page) == ["```python\nx = 1\ny = '#3'\n```", "    run --flag"]
