"""What `PGJOBS["ON_DEAD_LETTER"]` names in tests."""

from __future__ import annotations

import os

from django_pgjobs.alerts import Alert
from tests.models import Effect


def note(alert: Alert) -> None:
    Effect.objects.create(what="alert", pid=os.getpid(), detail=f"{alert.number} {alert.error}")


not_callable = 7
