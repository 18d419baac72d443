"""Rows that anyone may write with bare SQL, and that no worker must stumble over."""

from __future__ import annotations

import json
import random
from typing import Any

import psycopg

from tests.faults import fuzz_jobs, hostile

ECHO = "tests.faults.fuzz_jobs.echo"
FAIL = "tests.faults.fuzz_jobs.fail"

DEEP = "[" * 5000 + "]" * 5000
DEEP_OBJECT = '{"a":' * 4000 + "1" + "}" * 4000
PAYLOADS = [
    "{}",
    "[]",
    "null",
    "true",
    "0",
    '""',
    '"text"',
    "[1, 2]",
    "1e5000",
    "-1e-5000",
    '{"args": 1}',
    '{"args": null}',
    '{"args": {}}',
    '{"kwargs": []}',
    '{"kwargs": "x"}',
    '{"kwargs": {"": 1, "self": 2, "1 2": 3, "args": 4}}',
    '{"args": [], "kwargs": {}, "more": 1}',
    '{"x": 1}',
    '{"": {"args": []}}',
    '{"args": [1e5000]}',
    '{"args": [1e400, -1e400]}',
    '{"args": [0.1e-400]}',
    '{"args": ["' + "x" * 3_000_000 + '"]}',
    '{"kwargs": {"' + "k" * 100_000 + '": 1}}',
    '{"args": [' + "0, " * 200_000 + "0]}",
    f'{{"args": {DEEP}}}',
    f'{{"kwargs": {{"x": {DEEP_OBJECT}}}}}',
    DEEP,
    DEEP_OBJECT,
]
PAST = [
    "-infinity",
    "4714-11-24 00:00:00+00 BC",
    "0044-03-15 12:00:00+00 BC",
    "0001-01-01 00:00:00+00",
    "0001-01-02 00:00:00+00",
    "1970-01-01 00:00:00+00",
]
FUTURE = [
    "infinity",
    "9999-12-31 23:59:59.999999+00",
    "10000-01-01 00:00:00+00",
    "294276-12-31 23:59:59.999999+00",
]
INSTANTS = PAST + FUTURE
COUNTS = ["-1", "0", "1", "2", "2147483646", "2147483647"]
METADATA = [
    "{}",
    "[]",
    "null",
    "5",
    '"text"',
    DEEP,
    DEEP_OBJECT,
    '{"interruptions": "many"}',
    '{"interruptions": 1e300}',
    '{"interruptions": -1e5000, "unknown_since": 1e5000}',
    '{"unknown_since": [1]}',
    '{"unknown_since": "NaN"}',
    '{"unknown_since": -1e300}',
    '{"unknown_since": null, "interruptions": {"a": 1}}',
    '{"result_problem": 5, "trace": "' + "t" * 1_000_000 + '"}',
]
ERRORS = [
    "[]",
    "{}",
    "null",
    "5",
    '"text"',
    '[null, 1, "x", [], {}]',
    '[{"at": 5, "attempt": "x", "message": null, "traceback": []}]',
    '[{"exception": {"a": 1}, "message": ["<b>"], "worker": 1e5000}]',
    DEEP,
    DEEP_OBJECT,
    json.dumps([{"at": "x", "message": "m" * 1000}] * 2000),
]
TOKENS = ["00000000-0000-0000-0000-000000000000", "ffffffff-ffff-ffff-ffff-ffffffffffff"]
TEXTS = [*hostile.TEXTS, "x" * 255, "\U0001f980" * 255, "x" * 256]

CASTS = {
    "id": "bigint",
    "queue_name": "varchar",
    "job_name": "varchar",
    "payload": "jsonb",
    "status": "job_status",
    "priority": "smallint",
    "attempts": "integer",
    "max_attempts": "integer",
    "crashes": "integer",
    "rerun_if_lost": "boolean",
    "locked_by": "uuid",
    "worker_id": "uuid",
    "last_error": "text",
    "errors": "jsonb",
    "error_fingerprint": "text",
    "unique_key": "varchar",
    "result": "jsonb",
    "metadata": "jsonb",
}  # the others are timestamptz

ODD: dict[str, list[Any]] = {
    "id": ["0", "-1", "-9223372036854775808", "9223372036854775807"],
    "queue_name": TEXTS,
    "priority": ["-32768", "-101", "-100", "100", "101", "32767"],
    "attempts": COUNTS,
    "max_attempts": COUNTS,
    "crashes": COUNTS,
    "rerun_if_lost": ["false"],
    "locked_by": [None, *TOKENS],
    "worker_id": TOKENS,
    "last_error": [*hostile.TEXTS, "e" * 2_000_000],
    "errors": ERRORS,
    "error_fingerprint": [*hostile.TEXTS, "f" * 10_000],
    "unique_key": TEXTS,
    "result": PAYLOADS,
    "metadata": METADATA,
}
# Not locked_at: only a claim has one.
INSTANT_COLUMNS = ["run_at", "stop_requested_at", "started_at", "attempted_at", "created_at", "updated_at"]
FINISHED = ["completed", "failed", "cancelled"]


def odd_row(rng: random.Random) -> dict[str, Any]:
    """The columns of a row, as texts: a few of them odd."""
    name = rng.choice([ECHO, ECHO, f"{ECHO}_async", FAIL, _unknown_name(rng), rng.choice(fuzz_jobs.NAMES)])
    status = rng.choice(["queued"] * 6 + ["processing"] * 3 + FINISHED)
    row = {"job_name": name, "payload": rng.choice(PAYLOADS), "status": status, "max_attempts": "2"}
    if name == FAIL:
        row["payload"] = json.dumps({"args": [rng.randrange(2**32)]})
    if status == "processing":  # by default, of a holder that has been silent for ever
        row["locked_at"] = rng.choice([None, *PAST])
        row["locked_by"] = rng.choice([None, *TOKENS])
    for column in rng.sample(sorted([*ODD, *INSTANT_COLUMNS]), rng.choice([0, 1, 1, 2, 4, 8])):
        if column == "max_attempts" and name in (FAIL, *fuzz_jobs.NAMES):
            continue  # what always fails and may be tried again two billion times does not end
        row[column] = rng.choice(ODD[column] if column not in INSTANT_COLUMNS else INSTANTS)
    return row


def _unknown_name(rng: random.Random) -> str:
    return rng.choice(["", "gone.tasks.gone", *TEXTS, hostile.text(rng)])


def insert(connection: psycopg.Connection[Any], row: dict[str, Any]) -> int | None:
    """The id of the new row; None where Postgres itself refuses it, which is as good."""
    columns = ", ".join(row)
    values = ", ".join(f"%({column})s::{CASTS.get(column, 'timestamptz')}" for column in row)
    statement = f"INSERT INTO background_jobs ({columns}) VALUES ({values}) RETURNING id"  # noqa: S608
    try:
        return int(connection.execute(statement, row).fetchone()[0])
    except (psycopg.DataError, psycopg.IntegrityError):
        return None
