"""A site in a process of its own, and people who visit it with a real browser.

Browsers are slow to start and not everywhere, so `./tests/run` alone leaves these tests out. To run them:

    pip install -e '.[browser]'
    ./tests/run tests/browser
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from django.db import connections

from tests.browser.visitors import MISSING, PATIENCE, Visitor, open_browser
from tests.sessions import session
from tests.workers import until

if TYPE_CHECKING:
    from playwright.sync_api import Browser

Visit = Callable[..., Visitor]

SITE = "the site of the tests"  # its sessions on the server


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    library = pytest.importorskip("playwright.sync_api", reason=f"Playwright {MISSING}")
    with pytest.MonkeyPatch.context() as patch, library.sync_playwright() as playwright:
        # Playwright has an event loop in this thread, which never runs while a test does.
        patch.setenv("DJANGO_ALLOW_ASYNC_UNSAFE", "true")
        library.expect.set_options(timeout=PATIENCE * 1000)
        with open_browser(playwright) as browser:
            yield browser


@pytest.fixture(scope="session")
def address(django_db_setup: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of a site that uses the databases of the tests."""
    log = tmp_path_factory.mktemp("site") / "log"
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.browser.settings",
        "PGJOBS_TEST_DATABASE_NAME": connections["default"].settings_dict["NAME"],
        "PGJOBS_TEST_OTHER_DATABASE_NAME": connections["other"].settings_dict["NAME"],
        "PGAPPNAME": SITE,
        "PYTHONUNBUFFERED": "1",
    }
    with log.open("wb") as stream:
        process = subprocess.Popen(
            [sys.executable, "-m", "django", "runserver", "--noreload", "--insecure", "127.0.0.1:0"],
            env=environment,
            stdout=stream,
            stderr=subprocess.STDOUT,
        )
    try:
        yield until(lambda: _address(process, log), what="the site to start", deadline=PATIENCE)
    finally:
        process.kill()
        process.wait()


def _address(process: subprocess.Popen[bytes], log: Path) -> str | None:
    said = log.read_text()
    assert process.poll() is None, said
    found = re.search(r"http://127\.0\.0\.1:[1-9][0-9]*", said)
    return found.group() if found else None


@pytest.fixture
def visit(browser: Browser, address: str, transactional_db: None) -> Iterator[Visit]:
    """Let people visit the site. In the end, no browser may have complained of anything."""
    visitors: list[Visitor] = []

    def visit(name: str, *permissions: str, **options: Any) -> Visitor:
        visitors.append(Visitor(browser, address, name, *permissions, **options))
        return visitors[-1]

    yield visit
    for visitor in visitors:
        visitor.context.close()
    until(_is_quiet, what="the site to answer whatever it was asked", deadline=PATIENCE)
    complaints = [complaint for visitor in visitors for complaint in visitor.complaints]
    assert not complaints, "\n".join(complaints)


def _is_quiet() -> bool:
    """Whether the site talks to the database no more, so that the tables can be emptied."""
    with session() as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database()"
            " AND application_name = %s",
            [SITE],
        ).fetchone()
    return row == (0,)


@pytest.fixture
def root(visit: Visit) -> Visitor:
    """A superuser."""
    return visit("root", superuser=True)
