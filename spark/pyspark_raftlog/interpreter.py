"""The Python in which Spark runs data sources: it must have this package.

Spark's JVM looks for data sources, and runs their tasks, with the first of these in the environment in which it was
started: `PYSPARK_DRIVER_PYTHON`, `PYSPARK_PYTHON`, `python3` on the path. If the JVM finds no source named raftlog, it
says DATA_SOURCE_NOT_FOUND and does not mention Python. So on a driver the import of this package chooses the Python
before the JVM starts, or warns; and `setup(spark)` registers the source in a session whose JVM has chosen another one.
Processes that Spark starts import this package too; there the import does nothing.
"""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

logger = logging.getLogger(__name__)

_DRIVERS: Final = "PYSPARK_DRIVER_PYTHON"
_WORKERS: Final = "PYSPARK_PYTHON"
_DEFAULT: Final = "python3"
_GATEWAY: Final = "PYSPARK_GATEWAY_PORT"
"""spark-submit sets this variable for a driver whose JVM ran first."""
_PACKAGES: Final = ("pyspark_raftlog", "raftlog")
_SEARCH: Final = "import sys, importlib.util as u; print([n for n in sys.argv[1:] if u.find_spec(n) is None])"
_SEARCH_S: Final = 60.0


def prepare() -> None:
    """Name this Python to Spark if none is named and no JVM runs; log a warning if Spark's lacks this package."""
    if _is_started_by_spark() or not sys.executable:
        return
    if _jvm() is None and _GATEWAY in os.environ:
        return  # the JVM's environment may differ from this one, and cannot be asked yet
    if _jvm() is None and not _named(os.environ) and not _is_this_python(_DEFAULT):
        os.environ[_WORKERS] = sys.executable
        return
    if problem := _problem_of(*_choice()):
        late = "" if _jvm() is None else ", or call pyspark_raftlog.setup(spark) with the session"
        logger.warning("%s%s", problem, late)


def register(spark: SparkSession | Any, source: type) -> None:
    """Register the source in a session, which then runs it with the Python of its functions.

    Raises:
        RuntimeError: this Python lacks the package; the message says what to do.
    """
    if getattr(spark, "_jsparkSession", None) is not None:  # otherwise Spark Connect: the server chooses its Python
        problem = _problem_of(spark.sparkContext.pythonExec, _WORKERS)
        if problem:
            raise RuntimeError(problem)
    spark.dataSource.register(source)


def _is_started_by_spark() -> bool:
    """Return whether this process is a worker or its daemon: they run as `python -m pyspark.daemon` and the like."""
    spec = getattr(sys.modules.get("__main__"), "__spec__", None)
    return spec is not None and spec.name.startswith("pyspark.")


def _jvm() -> Any:
    """Return the JVM of this process, None without one; PySpark without a JVM (pyspark-client) never has one."""
    context = sys.modules.get("pyspark.core.context")
    return None if context is None else context.SparkContext._jvm


def _named(environment: Any) -> tuple[str, str] | None:
    """Return (the Python that an environment names to Spark, the variable)."""
    return next(((environment[name], name) for name in (_DRIVERS, _WORKERS) if environment.get(name)), None)


def _choice() -> tuple[str, str]:
    """Return the Python with which the JVM looks for data sources, and the variable or path that names it."""
    jvm = _jvm()
    environment = os.environ if jvm is None else {n: jvm.System.getenv(n) for n in (_DRIVERS, _WORKERS)}
    return _named(environment) or (_DEFAULT, "the path")


def _is_this_python(python: str) -> bool:
    found = shutil.which(python)
    return (
        found is not None
        and os.path.dirname(os.path.abspath(found)) == os.path.dirname(sys.executable)
        and os.path.realpath(found) == os.path.realpath(sys.executable)
    )


def _problem_of(python: str, named_by: str) -> str | None:
    """Return the reason why this Python cannot run the data source, None if it can."""
    if _is_this_python(python):
        return None
    try:
        done = subprocess.run(
            [python, "-c", _SEARCH, *_PACKAGES], capture_output=True, text=True, timeout=_SEARCH_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        found = f"cannot run: {error}"
    else:
        if done.returncode == 0 and done.stdout.strip() == "[]":
            return None
        found = "does not have the package raftlog" if done.returncode == 0 else f"fails: {done.stderr.strip()[-300:]}"
    return (
        f'Spark\'s Python is {python} (from {named_by}), which {found}. format("raftlog") will end in '
        f"DATA_SOURCE_NOT_FOUND or in a failed task; install raftlog[spark] for that Python, or start the program with "
        f"{_WORKERS}={sys.executable} and without {_DRIVERS}"
    )
