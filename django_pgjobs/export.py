"""Jobs as CSV or as JSON lines, without secrets: read a few at a time, so that many need no more memory."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from datetime import datetime
from itertools import islice
from typing import Any

from asgiref.sync import sync_to_async
from django.db.models import Case, QuerySet, TextField, Value, When
from django.db.models.functions import Cast, Left, Length
from django.db.models.lookups import LessThan

from .conf import config
from .models import BackgroundJob
from .redaction import HIDDEN, MOST_READ, Redacted

BATCH = 50  # jobs that are in memory
MOST_TEXT = 100_000  # characters of an error
CHUNK = 2_000  # ids that the server hands out at once
CHUNK_SIZE = 64_000  # characters that are sent at once

PLAIN = (
    "id", "status", "queue_name", "job_name", "priority", "attempts", "max_attempts", "created_at", "run_at",
    "started_at", "attempted_at", "updated_at", "worker_id", "error_fingerprint",
)  # fmt: skip
COLUMNS = (*PLAIN, "unique_key", "payload", "result", "metadata", "last_error", "errors")
_JSON = ("result", "metadata", "errors")


def jobs_of(queryset: QuerySet[Any]) -> Iterator[dict[str, Any]]:
    """The jobs of a queryset in its order, each as a dictionary of what may be shown of it."""
    ids = queryset.values_list("pk", flat=True).iterator(chunk_size=CHUNK)
    rows = BackgroundJob.objects.using(config().DATABASE)
    texts = {f"{name}_text": _text(name) for name in ("payload", *_JSON)}
    while batch := list(islice(ids, BATCH)):
        found = rows.filter(pk__in=batch).values(
            *PLAIN, "unique_key", error=Left("last_error", MOST_TEXT), **texts
        )
        by_id = {row["id"]: row for row in found}
        yield from (_shown(by_id[id]) for id in batch if id in by_id)


def _text(name: str) -> Case:
    """A JSON column as text; null where it is too large to be searched for secrets."""
    text = Cast(name, TextField())
    return Case(
        When(**{f"{name}__isnull": True}, then=Value("null")),
        When(LessThan(Length(text), MOST_READ), then=text),
        output_field=TextField(),
    )


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    redacted = Redacted(row["job_name"], row["payload_text"])
    shown = {name: row[name] for name in PLAIN}
    shown["unique_key"] = redacted.text(row["unique_key"] or "") or None
    shown["payload"] = redacted.payload
    for name in _JSON:
        text = row[f"{name}_text"]
        shown[name] = HIDDEN if text is None else None if text == "null" else redacted.value(_read(text))
    error = row["error"] or ""
    shown["last_error"] = redacted.text(error, is_cut=len(error) == MOST_TEXT) or None
    return {name: shown[name] for name in COLUMNS}


def _read(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return HIDDEN


def as_json_lines(jobs: Iterable[dict[str, Any]]) -> Iterator[str]:
    """Each job as a JSON object on a line of its own."""
    for job in jobs:
        yield json.dumps(job, default=_plain, ensure_ascii=False) + "\n"


def as_csv(jobs: Iterable[dict[str, Any]]) -> Iterator[str]:
    """A line of names, then a line for each job. JSON stands in its cell as text.

    What a spreadsheet would take for a formula gets an apostrophe in front.
    """
    buffer = io.StringIO()
    writer = csv.writer(buffer)
    writer.writerow(COLUMNS)
    for job in jobs:
        writer.writerow([_cell(value) for value in job.values()])
        yield buffer.getvalue()
        buffer.seek(0)
        buffer.truncate()
    yield buffer.getvalue()


def _cell(value: Any) -> Any:
    if value is None or isinstance(value, int | float):
        return value
    text = json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(_plain(value))
    return f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text


def _plain(value: Any) -> str:
    return value.isoformat() if isinstance(value, datetime) else str(value)


def in_chunks(lines: Iterable[str]) -> Iterator[str]:
    """The same text in larger pieces, since each takes its way through the server."""
    chunk: list[str] = []
    size = 0
    for line in lines:
        chunk.append(line)
        size += len(line)
        if size >= CHUNK_SIZE:
            yield "".join(chunk)
            chunk, size = [], 0
    if chunk:
        yield "".join(chunk)


async def from_async(chunks: Iterator[str]) -> AsyncIterator[str]:
    """The same for ASGI, which would else gather all of it before it sends anything."""
    read_next = sync_to_async(lambda: next(chunks, None))
    while (chunk := await read_next()) is not None:
        yield chunk


FORMS: dict[str, tuple[Callable[[Iterable[dict[str, Any]]], Iterator[str]], str]] = {
    "csv": (as_csv, "text/csv; charset=utf-8"),
    "jsonl": (as_json_lines, "application/jsonl; charset=utf-8"),
}
