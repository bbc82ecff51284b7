"""The import of the connector where PySpark is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest


def test_without_pyspark_the_import_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.partition(".")[0] in ("pyspark", "pyspark_raftlog")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "pyspark", None)  # an import of it fails
    with pytest.raises(
        ModuleNotFoundError, match=r"needs the package pyspark.* pip install '\.\[spark\]' in the checkout"
    ):
        importlib.import_module("pyspark_raftlog")
