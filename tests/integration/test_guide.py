"""The Python in docs/python.md runs as it stands there, block after block, against a real broker."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from raftlog.testing import Cluster
from tests.support.patient_polls import patient_polls
from tests.support.steady import STEADY

GUIDE = Path(__file__).parents[2] / "docs" / "python.md"
BLOCKS = re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)

_TOLD = ("assigned 2", "revoked 2", "lost 2", "all is well")


@pytest.mark.filterwarnings("error")
def test_the_guide(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pandas")
    names: dict[str, Any] = {"__name__": "guide"}
    with Cluster(nodes=1, config=STEADY) as cluster, patient_polls(monkeypatch, cluster.bootstrap, gathering=True):
        assert "127.0.0.1:9092" in BLOCKS[0]
        for number, block in enumerate(BLOCKS):
            code = block.replace("127.0.0.1:9092", cluster.bootstrap)
            exec(compile(code, f"{GUIDE.name}, block {number + 1}", "exec"), names)
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "1"
    assert printed[1].endswith(" 1 1")
    assert printed[2:4] == ["[(1, False)]", "1 [(1, 'leader', 0)]"]
    assert printed[4:7] == ["1 [1] [1] []", "[(1, 0, True)]", "{}"]
    assert printed[7:9] == ["sensors 0", "3"]
    assert sum(line.startswith("refused: ") for line in printed) == 2
    assert printed.count("aborted: ada has not got that much") == 1
    assert printed.count("transferred: [b'+10', b'-10']") == 1
    assert "['topic', 'partition', 'offset', 'timestamp', 'key', 'value', 'headers']" in printed
    assert "9 records in all" in printed
    assert "9 records in the table" in printed
    assert "[('ada', '/')]" in printed
    assert [line for line in printed if line.startswith("9 readings")] == ["9 readings for thermostat"]
    assert printed.count("True") == 2
    assert [line for line in printed if line in _TOLD] == ["assigned 2", "all is well", "revoked 2"]
    assert printed[-1].startswith("[UserScramCredential(user='orders', ")
    assert printed[-5:-1] == ["0", "1", "103 103 [b'one', b'two', b'three']", "0"]
