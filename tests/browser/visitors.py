"""People in front of a browser, and what their browser complains of while they look around."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
from django.conf import settings
from django.contrib.auth.models import Permission, User
from django.test import Client

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Page, Playwright, Response

PROGRAMS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
MISSING = "is not installed. Run: pip install -e '.[browser]'"
SEE = (
    "view_backgroundjob",
    "view_deadletter",
    "view_backgroundoperation",
    "view_backgroundqueue",
    "view_backgroundschedule",
    "view_backgroundworker",
)
PATIENCE = 120.0  # seconds; only ever waited for by a test that fails
DESKTOP = {"width": 1280, "height": 900}
PHONE = {"width": 390, "height": 844}

# Each violation of the policy, and what would have been blocked.
WATCH = """
document.addEventListener("securitypolicyviolation", (event) => {
  complain(`${event.violatedDirective} forbids ${event.blockedURI} ${event.sourceFile}:${event.lineNumber}`);
});
"""


def find_program(downloaded: str = "") -> str | None:
    """A Chromium that starts: one of the PATH or, failing that, the one that Playwright has downloaded."""
    for candidate in [*filter(None, map(shutil.which, PROGRAMS)), downloaded]:
        if not os.access(candidate, os.X_OK):
            continue
        asked = subprocess.run([candidate, "--version"], capture_output=True, check=False, timeout=60)
        if asked.returncode == 0:
            return candidate
    return None


@contextmanager
def open_browser(playwright: Playwright) -> Iterator[Browser]:
    """A browser without a window. Skips the test where there is none."""
    program = find_program(playwright.chromium.executable_path)
    if program is None:
        pytest.skip(f"No Chromium was found: none of {', '.join(PROGRAMS)} is on the PATH and starts.")
    browser = playwright.chromium.launch(executable_path=program, args=["--disable-dev-shm-usage"])
    yield browser
    browser.close()


class Visitor:
    """Somebody who is logged in, with a page of a browser."""

    def __init__(
        self,
        browser: Browser,
        address: str,
        name: str,
        *permissions: str,
        superuser: bool = False,
        **options: Any,
    ) -> None:
        self.name = name
        self.address = address
        self.complaints: list[str] = []
        self.context = browser.new_context(
            base_url=address, **{"viewport": DESKTOP, "reduced_motion": "reduce", **options}
        )
        self.context.expose_binding("complain", lambda source, text: self.complaints.append(text))
        self.context.add_init_script(WATCH)
        session = self._log_in(name, permissions, superuser)
        self.context.add_cookies([{"name": settings.SESSION_COOKIE_NAME, "value": session, "url": address}])
        self.context.set_default_timeout(PATIENCE * 1000)
        self.page: Page = self.context.new_page()
        self.page.on("console", self._read)
        self.page.on("pageerror", lambda error: self._blame("script", str(error)))
        self.page.on("response", self._hear)

    @staticmethod
    def _log_in(name: str, permissions: tuple[str, ...], superuser: bool) -> str:
        user, _ = User.objects.get_or_create(
            username=name, defaults={"is_staff": True, "is_superuser": superuser}
        )
        user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
        client = Client()
        client.force_login(user)
        return client.cookies[settings.SESSION_COOKIE_NAME].value

    def _blame(self, what: str, text: str) -> None:
        self.complaints.append(f"{what} at {self.page.url}: {text}")

    def _read(self, message: ConsoleMessage) -> None:
        if message.type == "error" and not message.text.startswith("Failed to load resource"):
            self._blame("console", message.text)

    def _hear(self, response: Response) -> None:
        if response.status >= 400 and not response.url.endswith("/favicon.ico"):
            self.complaints.append(f"{response.url} answers with status {response.status}")

    def go(self, path: str) -> Page:
        """Open a page of the site."""
        response = self.page.goto(path)
        assert response is not None
        assert response.status == 200, f"{path} answers with status {response.status}."
        return self.page

    def post(self, path: str, **data: str) -> int:
        """Send a form that no page has offered, and return the status of the answer."""
        token = next(each["value"] for each in self.context.cookies() if each["name"] == "csrftoken")
        answer = self.context.request.post(
            path,
            form={"csrfmiddlewaretoken": token, **data},
            headers={"Referer": self.address},
            max_redirects=0,
        )
        return int(answer.status)
