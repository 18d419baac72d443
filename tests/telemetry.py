"""OpenTelemetry for workers that import this module: each span becomes a line of JSON in a file.

Spans wait until they are asked for. PGJOBS_TEST_SPANS names the file; PGJOBS_TEST_SPANS_BEFORE_FORK says that
the tracer provider is there before there are executors.
"""

from __future__ import annotations

import os
from typing import Any

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, ConsoleSpanExporter

from django_pgjobs.signals import executor_started

NEVER = 3_600_000  # milliseconds


def set_up(**kwargs: Any) -> None:
    lines = open(os.environ["PGJOBS_TEST_SPANS"], "a", buffering=1)  # noqa: SIM115 - until the process ends
    exporter = ConsoleSpanExporter(out=lines, formatter=lambda span: span.to_json(indent=None) + "\n")
    provider = TracerProvider(resource=Resource({"process.pid": os.getpid()}))
    provider.add_span_processor(BatchSpanProcessor(exporter, schedule_delay_millis=NEVER))
    trace.set_tracer_provider(provider)


if os.environ.get("PGJOBS_TEST_SPANS_BEFORE_FORK"):
    set_up()
else:
    executor_started.connect(set_up)
