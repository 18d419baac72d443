from __future__ import annotations

from collections.abc import Callable

from django.conf import settings
from django.contrib.contenttypes.models import ContentType
from django.http import HttpRequest, HttpResponse

View = Callable[[HttpRequest], HttpResponse]


def forget_content_types(get_response: View) -> View:
    """After each test, the content types are others."""

    def middleware(request: HttpRequest) -> HttpResponse:
        ContentType.objects.clear_cache()
        return get_response(request)

    return middleware


def content_security_policy(get_response: View) -> View:
    """Carry SECURE_CSP out on Django 5.2."""
    policy = "; ".join(" ".join([name, *sources]) for name, sources in settings.SECURE_CSP.items())

    def middleware(request: HttpRequest) -> HttpResponse:
        response = get_response(request)
        response["Content-Security-Policy"] = policy
        return response

    return middleware
