"""Rules that make a user's name of a client's certificate (KIP-371, `ssl.principal.mapping.rules`).

    rules   rule {"," rule}
    rule    "DEFAULT" | "RULE:" pattern "/" replacement "/" ["L" | "U"]

A rule applies if its pattern matches the whole distinguished name, in the form of RFC 2253, the most specific part
first: `CN=orders,OU=billing,O=Example`. The first rule that applies makes the name: the replacement, in which `$1` is
the first group, in lower or upper case if the rule says so. `DEFAULT` applies to a certificate with one common name,
and takes that, as without rules; Kafka's takes the whole distinguished name. A certificate to which no rule applies
names no user. Patterns are Python's; a `/` or a backslash in a pattern or a replacement has a backslash before it.

Both listeners give the same name: gRPC tells the distinguished name as OpenSSL prints it, and `name_of_subject` makes
the same of what Python's `ssl` has.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

_RULE: Final = re.compile(r"\s*(?:(DEFAULT)|RULE:((?:\\.|[^\\/])+)/((?:\\.|[^\\/])*)/([LU]?))\s*(,|$)")
_GROUP: Final = re.compile(r"\\(.)|\$(\d)")
_SHORT: Final = {
    "commonName": "CN",
    "countryName": "C",
    "domainComponent": "DC",
    "localityName": "L",
    "organizationName": "O",
    "organizationalUnitName": "OU",
    "stateOrProvinceName": "ST",
    "streetAddress": "street",
    "userId": "UID",
}
"""Names of attributes as RFC 2253 and OpenSSL shorten them; others stay."""
_ESCAPED: Final = frozenset(',+"\\<>;')


class Rule(NamedTuple):
    """One rule; `pattern` None: DEFAULT."""

    pattern: re.Pattern[str] | None
    replacement: str = ""
    case: str = ""

    def name_of(self, distinguished_name: str, common_names: Sequence[str]) -> str | None:
        """Return the name that the rule makes; None: it does not apply."""
        if self.pattern is None:
            return common_names[0] if len(common_names) == 1 else None
        found = self.pattern.fullmatch(distinguished_name)
        if found is None:
            return None
        name = _GROUP.sub(lambda part: part[1] or found[int(part[2])] or "", self.replacement)
        return {"L": name.lower(), "U": name.upper()}.get(self.case, name)


DEFAULT: Final = (Rule(None),)


def parse(text: str) -> tuple[Rule, ...]:
    """Return the rules of a setting; without any, DEFAULT.

    Raises:
        ValueError: they are not written so; the message says where and what.
    """
    rules, at = [], 0
    while at < len(text.rstrip()):
        found = _RULE.match(text, at)
        if found is None:
            raise ValueError(
                f"{text[at : at + 60]!r}: write DEFAULT or RULE:PATTERN/REPLACEMENT/, with L or U at the end"
            )
        default, pattern, replacement, case, _ = found.groups()
        if default:
            rules.append(Rule(None))
        else:
            rules.append(_rule(pattern, replacement, case))
        at = found.end()
    return tuple(rules) or DEFAULT


def _rule(pattern: str, replacement: str, case: str) -> Rule:
    try:
        compiled = re.compile(pattern.replace(r"\/", "/"))
    except re.error as error:
        raise ValueError(f"{pattern!r} is no pattern: {error}") from None
    groups = [int(part[2]) for part in _GROUP.finditer(replacement) if part[2]]
    if max(groups, default=0) > compiled.groups:
        raise ValueError(f"{replacement!r} has ${max(groups)}, and {pattern!r} has {compiled.groups} groups")
    return Rule(compiled, replacement, case)


def name_of(rules: Iterable[Rule], distinguished_name: str, common_names: Sequence[str]) -> str | None:
    """Return the name that the first rule that applies makes; None: none applies."""
    made = (rule.name_of(distinguished_name, common_names) for rule in rules)
    return next((name for name in made if name is not None), None)


def name_of_subject(subject: Iterable[Iterable[tuple[str, str]]]) -> str:
    """Return the distinguished name of a subject as `ssl.SSLObject.getpeercert` has it."""
    parts = ["+".join(f"{_SHORT.get(name, name)}={_escape(value)}" for name, value in part) for part in subject]
    return ",".join(reversed(parts))


def _escape(value: str) -> str:
    """Return a value as OpenSSL prints it (XN_FLAG_RFC2253)."""
    shown = []
    for at, character in enumerate(value):
        if character in _ESCAPED or (at == 0 and character in "# ") or (at == len(value) - 1 and character == " "):
            shown.append("\\" + character)
        elif " " <= character <= "~":
            shown.append(character)
        else:
            shown.append("".join(f"\\{byte:02X}" for byte in character.encode()))
    return "".join(shown)
