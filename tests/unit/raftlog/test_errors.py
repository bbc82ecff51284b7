"""Every wire code has one class, every class with a code one code, and both ways of travelling agree."""

from __future__ import annotations

import pytest

from raftlog import errors
from raftlog.v1 import common_pb2


def every_class(root: type[errors.RaftlogError] = errors.RaftlogError) -> list[type[errors.RaftlogError]]:
    """Return the tree's classes; what another module derives for its own use is not part of it."""
    ours = [sub for sub in root.__subclasses__() if sub.__module__ == errors.__name__]
    return [root] + [found for sub in ours for found in every_class(sub)]


def test_classes_and_wire_codes_map_one_to_one() -> None:
    coded = [cls.__dict__["code"] for cls in every_class() if cls.__dict__.get("code") is not None]
    assert len(coded) == len(set(coded))
    assert set(coded) == set(common_pb2.ErrorCode.values()) - {common_pb2.NONE}


@pytest.mark.parametrize("code", [code for code in common_pb2.ErrorCode.values() if code != common_pb2.NONE])
def test_an_error_survives_the_wire(code: common_pb2.ErrorCode.ValueType) -> None:
    back = errors.from_wire(common_pb2.Error(code=code, message="what was wrong"))
    assert str(back) == "what was wrong"
    assert errors.to_wire(back) == common_pb2.Error(code=code, message="what was wrong")


def test_not_leader_carries_who_leads() -> None:
    wire = errors.to_wire(errors.NotLeader("moved", leader_id=3, leader_epoch=9))
    back = errors.from_wire(wire)
    assert isinstance(back, errors.NotLeader)
    assert (back.leader_id, back.leader_epoch) == (3, 9)


def test_an_unknown_code_and_a_foreign_exception_become_internal_errors() -> None:
    unknown = common_pb2.Error(message="new")
    unknown.code = 31_337  # type: ignore[assignment] # a code that a newer broker may send
    assert "31337" in str(errors.from_wire(unknown))
    assert errors.to_wire(KeyError("x")).code == common_pb2.INTERNAL


def test_local_errors_do_not_borrow_their_parents_code() -> None:
    assert errors.to_wire(errors.ClosedError("closed")).code == common_pb2.INTERNAL


def test_every_class_is_drawn_in_the_tree() -> None:
    assert errors.__doc__ is not None
    for cls in every_class():
        assert cls.__name__ in errors.__doc__, f"{cls.__name__} is missing from the tree in the docstring"
