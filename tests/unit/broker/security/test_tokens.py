"""Tokens say what they were issued for, to the process that has issued them, and nothing else passes for one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from broker.security.tokens import LIFETIME_MS, MAX_TOKEN_CHARS, Login, Tokens
from tests.support.scram_parts import credential

ALICE = credential("alice", "secret", version=7)
TOKENS = Tokens(b"k" * 32)
ISSUED = TOKENS.issue(ALICE, 1_000.7)


def test_a_token_says_who_with_which_credential_and_until_when() -> None:
    assert TOKENS.read(ISSUED) == Login("alice", ALICE.mechanism, 7, 1_000 + LIFETIME_MS)


def test_another_process_does_not_know_it() -> None:
    assert Tokens().read(ISSUED) is None
    assert Tokens().read(Tokens().issue(ALICE, 0)) is None
    assert Tokens(b"k" * 32).read(ISSUED) is not None


@given(st.integers(min_value=0, max_value=len(ISSUED) - 1), st.characters())
def test_no_character_can_be_changed(at: int, character: str) -> None:
    forged = ISSUED[:at] + character + ISSUED[at + 1 :]
    assert (TOKENS.read(forged) is None) == (forged != ISSUED)


@given(st.text())
def test_no_text_passes_for_a_token(text: str) -> None:
    assert TOKENS.read(text) is None
    assert TOKENS.read(f"{text}.{ISSUED.rpartition('.')[2]}") is None


def test_users_with_the_longest_names_get_tokens_that_are_read() -> None:
    longest = credential("\U0001f600" * 255, "secret")
    token = TOKENS.issue(longest, 2**52)
    assert len(token) <= MAX_TOKEN_CHARS
    found = TOKENS.read(token)
    assert found is not None
    assert found.user == longest.user
    assert TOKENS.read("A" * MAX_TOKEN_CHARS + ISSUED) is None
