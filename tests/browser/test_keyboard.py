"""The main path without a mouse."""

from __future__ import annotations

import re

import pytest

from tests.browser.test_paths import dead, statuses
from tests.browser.visitors import MISSING, Visitor

expect = pytest.importorskip("playwright.sync_api", reason=f"Playwright {MISSING}").expect

# What has the focus: what it is called, and whether it looks any different for it.
FOCUSED = """() => {
  const one = document.activeElement;
  const look = () => {
    const style = getComputedStyle(one);
    const outline = style.outlineStyle === "none" ? "" : style.outlineWidth;
    return [outline, style.boxShadow, style.color, style.backgroundColor, style.borderTopColor,
      style.textDecorationLine].join();
  };
  one.style.transition = "none";
  const focused = look();
  one.blur();
  const blurred = look();
  one.focus();
  const labels = [...(one.labels ?? [])].map((label) => label.textContent);
  return {
    name: (one.ariaLabel || labels.join(" ") || one.textContent || one.value || "").trim(),
    visible: focused !== blurred,
    ours: document.getElementById("content").contains(one),
  };
}"""


def tab_to(visitor: Visitor, name: str) -> None:
    """Press Tab until something of this name has the focus. Wherever it stops on the way, that is seen."""
    stops = []
    for _ in range(100):
        visitor.page.keyboard.press("Tab")
        stop = visitor.page.evaluate(FOCUSED)
        stops.append(stop["name"])
        assert stop["visible"] or not stop["ours"], f"Nobody sees that {stop['name']!r} has the focus."
        if re.search(name, stop["name"]):
            return
    raise AssertionError(f"Tab does not lead to {name!r}, but to {stops}.")


def test_the_main_path_needs_no_mouse(root: Visitor) -> None:
    ids = dead(12)
    page = root.go("/admin/django_pgjobs/overview/")
    wrong = page.get_by_role("region", name="What is wrong")
    expect(wrong).to_contain_text("dead letters")
    tab_to(root, "^Show: Dead letters are rising")
    page.keyboard.press("Enter")
    expect(page).to_have_url(re.compile("/deadletter/groups/"))
    tab_to(root, "the bank has not answered")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="These failed alike")).to_be_visible()
    tab_to(root, "Traceback of one of them")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Traceback (most recent call last)")).to_be_visible()
    tab_to(root, "^Retry all that match")
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Retry 12 dead letters")).to_be_visible()
    tab_to(root, "^Reason")
    page.keyboard.type("The bank is back.")
    tab_to(root, "^Retry 12 dead letters")
    page.keyboard.press("Enter")
    expect(page.locator(".messagelist")).to_contain_text("12 jobs queued again.")
    assert statuses(ids) == {"queued": 12}
