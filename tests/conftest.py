from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest
from django.db import connections

from tests.database import choose
from tests.workers import Workers


def pytest_report_header() -> str:
    parameters = connections["default"].get_connection_params()
    try:
        with psycopg.connect(**{**parameters, "dbname": "postgres"}) as connection:
            version = connection.info.parameter_status("server_version")
    except psycopg.OperationalError as error:
        return f"postgres: {choose().description}, which does not let us in: {error}"
    return f"postgres: {version}, {choose().description}"


@pytest.fixture
def child_environment(django_db_setup: None) -> dict[str, str]:
    """Return the environment in which a child process uses this run's test databases."""
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.settings",
        "PGJOBS_TEST_DATABASE_NAME": connections["default"].settings_dict["NAME"],
        "PGJOBS_TEST_OTHER_DATABASE_NAME": connections["other"].settings_dict["NAME"],
    }


@pytest.fixture
def workers(tmp_path: Path, child_environment: dict[str, str], transactional_db: None) -> Iterator[Workers]:
    """Start real worker processes; none outlives the test."""
    workers = Workers(tmp_path, child_environment)
    yield workers
    workers.end()
