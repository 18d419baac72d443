"""A project's own context, as PGJOBS["CONTEXT"] names it: what a request would have set."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.utils import translation

tenant: ContextVar[str] = ContextVar("tenant", default="nobody")


def capture() -> dict[str, Any]:
    return {"tenant": tenant.get(), "language": translation.get_language()}


@contextmanager
def restore(context: dict[str, Any]) -> Iterator[None]:
    token = tenant.set(context.get("tenant", "nobody"))
    try:
        with translation.override(context.get("language")):
            yield
    finally:
        tenant.reset(token)


class Wrong:
    """Hooks that cannot work."""

    @staticmethod
    def restore(context: dict[str, Any]) -> Any:
        raise RuntimeError("nothing to restore")

    @staticmethod
    def capture() -> Any:
        return {"when": object()}


no_dictionary = type("no_dictionary", (), {"capture": lambda: [1], "restore": Wrong.restore})
no_manager = type("no_manager", (), {"capture": dict, "restore": lambda context: None})
not_restored = type("not_restored", (), {"capture": dict, "restore": Wrong.restore})
not_a_hook = object()
