"""The wire contract says how a client reacts to each error, and the SDK does so."""

from __future__ import annotations

import pytest

from raftlog import errors
from raftlog._client.metadata import may_pass
from raftlog._client.producer import LEADER_ERRORS
from raftlog.v1 import common_pb2, options_pb2

CODES = [code for code in common_pb2.ErrorCode.values() if code != common_pb2.NONE]
AGAIN = (options_pb2.RETRY_SAME, options_pb2.RETRY_REFRESH)


@pytest.mark.parametrize("code", CODES)
def test_every_code_says_what_to_do(code: int) -> None:
    assert errors.retry_of(code) != options_pb2.RETRY_UNSPECIFIED


@pytest.mark.parametrize("code", CODES)
def test_the_classes_of_the_sdk_agree(code: int) -> None:
    found, retry = errors.class_of(code), errors.retry_of(code)
    fenced = issubclass(found, (errors.FencedError, errors.TokenExpired))
    if code == common_pb2.FENCED_LEADER_EPOCH:  # a fence that metadata mends, so that the same request is sent again
        assert fenced
        assert retry == options_pb2.RETRY_REFRESH
        return
    assert issubclass(found, errors.RetriableError) == (retry in AGAIN)
    assert fenced == (retry == options_pb2.RETRY_RENEW)


@pytest.mark.parametrize("code", CODES)
def test_look_ups_repeat_what_the_table_lets_them(code: common_pb2.ErrorCode.ValueType) -> None:
    """After a refusal that needs something new, a look-up asks again: it has no epoch or membership of its own."""
    error = errors.from_wire(common_pb2.Error(code=code, message="refused"))
    expected = (*AGAIN, options_pb2.RETRY_RENEW)
    assert may_pass(error) == (errors.retry_of(code) in expected and code != common_pb2.TOKEN_EXPIRED)


def test_after_errors_about_the_leader_the_table_asks_for_metadata() -> None:
    assert {errors.retry_of(code) for code in LEADER_ERRORS} == {options_pb2.RETRY_REFRESH}


def test_an_unknown_code_is_final() -> None:
    assert errors.retry_of(31_337) == options_pb2.RETRY_FINAL
