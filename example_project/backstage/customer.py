"""Somebody who visits the site over HTTP, with cookies and CSRF tokens, as a browser would."""

import re
import urllib.error
import urllib.request
from http.cookiejar import CookieJar
from urllib.parse import urlencode, urljoin


class Customer:
    def __init__(self, site: str) -> None:
        self.site = site
        self.jar = CookieJar()
        # No proxies: the site is on this machine, whatever the environment says.
        self.browser = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPCookieProcessor(self.jar)
        )

    def get(self, path: str) -> str:
        with self.browser.open(urljoin(self.site, path), timeout=30) as response:
            return response.read().decode()

    def post(self, path: str, **fields: object) -> tuple[int, str]:
        """Send a form with the token from its page; return status and page, with redirects followed."""
        token = re.search(r'name="csrfmiddlewaretoken" value="(\w+)"', self.get(path))[1]
        form = urlencode({"csrfmiddlewaretoken": token, **fields}).encode()
        try:
            with self.browser.open(urljoin(self.site, path), form, timeout=30) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def order(self, product_id: int, quantity: int, email: str) -> bool:
        """Place an order; return whether the shop took it."""
        status, page = self.post("/", product=product_id, quantity=quantity, email=email)
        if status not in (200, 422):
            raise RuntimeError(f"The shop answered an order with status {status}:\n{page[:2000]}")
        return status == 200
