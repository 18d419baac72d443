"""What would have been sent to Sentry, as lines of JSON in the file that PGJOBS_TEST_EVENTS names.

Events wait in the process until somebody flushes them, or PGJOBS_TEST_EVENTS_AT_ONCE is set.
"""

from __future__ import annotations

import json
import os
from typing import Any

from sentry_sdk.envelope import Envelope
from sentry_sdk.transport import Transport


class Gathering(Transport):
    def __init__(self, options: Any = None) -> None:
        super().__init__(options)
        self._events: list[Any] = []

    def capture_envelope(self, envelope: Envelope) -> None:
        self._events += [item.payload.json for item in envelope.items if item.type == "event"]
        if os.environ.get("PGJOBS_TEST_EVENTS_AT_ONCE"):
            self.flush(0)

    def flush(self, timeout: float, callback: Any = None) -> None:
        with open(os.environ["PGJOBS_TEST_EVENTS"], "a") as file:
            for event in self._events:
                print(json.dumps(event), file=file)
        self._events.clear()
