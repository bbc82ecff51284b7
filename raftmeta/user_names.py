"""What users may be called. Pure.

A name goes through SASLprep (RFC 4013) on its way, as SCRAM has it (RFC 5802, section 5.1), so only names that SASLprep
leaves as they are can log in. `,` and `=` are fine: SCRAM escapes them. The tables are those of Unicode 3.2, whatever
Unicode this Python knows: every controller decides the same.
"""

from __future__ import annotations

import stringprep
from typing import Final
from unicodedata import ucd_3_2_0

MAX_USER_CHARACTERS: Final = 255
RESERVED: Final = ("*", "ANONYMOUS")
"""`User:*` is everybody, and `User:ANONYMOUS` who did not say."""

_FORBIDDEN: Final = (
    stringprep.in_table_a1,  # not assigned
    stringprep.in_table_b1,  # mapped to nothing
    stringprep.in_table_c12,  # spaces other than ' '
    stringprep.in_table_c21_c22,  # control characters
    stringprep.in_table_c3,  # private use
    stringprep.in_table_c4,  # no characters
    stringprep.in_table_c5,  # surrogates
    stringprep.in_table_c6,  # not for plain text
    stringprep.in_table_c7,  # not for canonical representation
    stringprep.in_table_c8,  # change how others are shown
    stringprep.in_table_c9,  # tags
)


def why_no_name(name: str) -> str | None:
    """Return what is wrong with the name of a principal, wherever it is from; None if nothing is.

    Names from certificates need not be such as could log in with a password.
    """
    if not 1 <= len(name) <= MAX_USER_CHARACTERS:
        return f"it has {len(name)} characters, it may have 1 to {MAX_USER_CHARACTERS}"
    for character in name:
        if is_hidden(character):
            return f"it has the control character {character!a}"
    return None


def why_no_user(name: str) -> str | None:
    """Return what is wrong with the name of a user with a password; None if nothing is."""
    why = why_no_name(name)
    if why is not None:
        return why
    if name in RESERVED:
        return "that name is reserved"
    if name != name.strip(" "):
        return "it begins or ends with a space"
    for character in name:
        if any(forbidden(character) for forbidden in _FORBIDDEN):
            return f"it has {character!a}, which SASLprep (RFC 4013) does not allow"
    if ucd_3_2_0.normalize("NFKC", name) != name:
        return "SASLprep (RFC 4013) makes another name of it; give it in Unicode's form NFKC"
    if any(map(stringprep.in_table_d1, name)) and not (
        stringprep.in_table_d1(name[0])
        and stringprep.in_table_d1(name[-1])
        and not any(map(stringprep.in_table_d2, name))
    ):
        return "it mixes scripts written from right to left with others, which SASLprep (RFC 4013) does not allow"
    return None


def is_hidden(character: str) -> bool:
    """Whether it is a control character or changes how others are shown: a log or a terminal would not show it."""
    return stringprep.in_table_c21_c22(character) or stringprep.in_table_c8(character)
