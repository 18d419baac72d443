"""The plug-in for pytest: one fixture.

A module of its own, outside of the package, since pytest loads it for every project of an environment: it
imports neither Django nor the package before the fixture is used, and asks for no settings.
"""

from __future__ import annotations

from types import ModuleType

import pytest


@pytest.fixture
def pgjobs(request: pytest.FixtureRequest) -> ModuleType:
    """The functions of `django_pgjobs.testing`: drain, run_job, captured_jobs and assert_enqueued.

    With access to the database, where pytest-django is there to give it.
    """
    if request.config.pluginmanager.has_plugin("django"):
        request.getfixturevalue("db")
    from django_pgjobs import testing

    return testing
