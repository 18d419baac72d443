"""The fixtures of the harnesses about a server's faults, which name this module in `pytest_plugins`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.faults.servers import Cluster
from tests.faults.stage import Stage


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A server that the tests of a module share, one after the other."""
    cluster = Cluster()
    yield cluster.start()
    cluster.close()


@pytest.fixture
def stage(cluster: Cluster, tmp_path: Path) -> Iterator[Stage]:
    """A database of its own for each test, on a server as it was in the beginning."""
    if not cluster.is_running:
        cluster.start()
    with ExitStack() as cleanup:
        yield Stage(cluster, tmp_path, cleanup)
    if cluster.is_running:
        cluster.reset_system()
