"""Whether the user that looks may see everything: what is not seen may have anything wrong with it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from shlex import quote
from typing import Final

from raftlog._core.words import counted
from raftlog._doctor.picture import Finding, Picture, ids
from raftlog._doctor.report import Check

NOT_ALL_SEEN: Final = "not-all-seen"
_WHO: Final = re.compile(r"(User:.+?) may not [A-Z]")
_LOOKS: Final = "--operation Describe --operation DescribeConfigs"


def restricted(picture: Picture) -> Iterator[Finding]:
    """Find what this user may not look at."""
    refusals = [each for each in picture.refusals() if each.part != "hanging"]  # one check, which is skipped
    unread = sorted(node_id for node_id, node in (picture.nodes or {}).items() if not node.configs)
    hidden = picture.hidden_topics
    if not (refusals or hidden or unread):
        return
    what = {"configs": "settings of ", "replicas": "how far replicas are, at "}
    parted = [each for each in refusals if each.who not in ("all", "some")]
    where = [f"{'some of the ' if each.who == 'some' else ''}{each.part}" for each in refusals if each not in parted]
    where += [f"settings of nodes {ids(unread)}"] if unread else []
    where += [f"topic {name}" for name in hidden]
    where += [f"{what.get(each.part, '')}{each.who}" for each in parted]
    parts = {each.part for each in refusals}
    if parts & {"quorum", "nodes"}:  # nobody tells what lists leave out
        where.append("topics, groups and transactions that are not shown, if there are any")
        parts |= {"topics", "groups", "transactions"}
    about = []
    if unread or parts & {"quorum", "nodes", "replicas"}:
        about.append(f"{_LOOKS} --cluster")
    if hidden or parts & {"topics", "configs"} or any("topic" in each.why for each in refusals):
        about.append(f"{_LOOKS} --topic '*'")
    if parts & {"groups", "lags"}:
        about.append("--operation Describe --group '*'")
    if "transactions" in parts:
        about.append("--operation Describe --transactional-id '*'")
    who = next((found[1] for each in refusals if (found := _WHO.search(each.why))), "User:NAME")
    among = f", {counted(len(hidden), 'topic')} among it" if hidden else ""
    yield Finding(
        NOT_ALL_SEEN,
        "warning",
        f"this user may not look at everything{among}; what is wrong there is not found",
        tuple(dict.fromkeys(where)),
        "; ".join(f"raftlog acl add --allow-principal {quote(who)} {each}" for each in about),
    )


CHECKS = (Check(NOT_ALL_SEEN, "what this user may not look at", (), restricted),)
