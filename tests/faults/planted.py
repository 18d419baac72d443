"""Bugs to plant, each with the harness that claims to find its kind. See `mutants`, which plants them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path


class Misplaced(Exception):
    """The text that a change replaces is not there, or there more than once."""


@dataclass(frozen=True)
class Change:
    """A text that is replaced by another; with `within`, in the SQL statement of that name."""

    file: str  # in the package
    text: str
    instead: str
    within: str = ""

    def apply(self, package: Path) -> None:
        path = package / self.file
        path.write_text(self.applied(path.read_text()))

    def applied(self, source: str) -> str:
        """The source with the change in it. Raises Misplaced."""
        begin, end = 0, len(source)
        if self.within:
            statement = re.search(rf'^{self.within} = """$.*?^"""$', source, re.MULTILINE | re.DOTALL)
            if statement is None:
                raise Misplaced(f"There is no statement {self.within} in {self.file}.")
            begin, end = statement.span()
        part = source[begin:end]
        if (count := part.count(self.text)) != 1:
            raise Misplaced(f"{self.file} has this {count} times: {self.text!r}")
        return source[:begin] + part.replace(self.text, self.instead) + source[end:]


@dataclass(frozen=True)
class Mutant:
    """One planted bug."""

    kind: str  # of failure
    changes: tuple[Change, ...]
    finder: str  # the tests that claim this kind, as pytest selects them


# ── Who finds what ────────────────────────────────────────────────────────────────────────────────────────

INTERLEAVINGS = "test_interleavings.py::test_every_order_comes_out_as_it_must"
STATEFUL = "test_stateful.py::test_the_table_holds_what_a_dictionary_foretells"
MODEL = "test_model.py::test_the_protocol_violates_no_property"
ATOMICITY = "test_enqueue_atomicity.py::test_jobs_share_the_fate_of_their_transaction"
ZOMBIES = "test_zombies.py::test_what_a_silent_host_has_lost_it_cannot_change"
AT_MOST_ONCE_STORM = "test_kill_storm.py::test_at_most_once_jobs_never_start_twice"
KILL_POINTS = "test_kill_points.py::test_each_kill_leaves_of_each_job_what_the_table_says"
POISON = "test_poison.py::test_killers_are_buried_and_the_others_complete"
LATE_STARTS = "test_halted_processes.py::test_what_was_handed_over_long_ago_does_not_start"
KILLED = "test_halted_processes.py::test_what_a_killed_executor_held_is_settled_when_it_is_known_to_be_gone"
RACES = "test_racing_sweepers.py::test_each_claim_is_swept_and_each_job_pruned_once_and_not_before_its_time"
CLOCKS = "test_clocks.py::test_wrong_clocks_change_nothing"
OUTAGES = "test_outages.py::test_jobs_that_go_on_after_an_outage_keep_their_claims"
LOST_ANSWERS = "test_outages.py::test_what_a_lost_answer_to_a_commit_did_is_found_out"
LOCKED_ROWS = "test_outages.py::test_outcomes_of_locked_rows_are_written_later"
DEAF = "test_listener.py::test_a_deaf_listener_is_replaced"
UNHEARD = "test_listener.py::test_a_job_created_while_the_listener_connects_is_found"
POOLER = "test_pooler.py::test_nothing_of_a_session_is_left_on_the_pool"
FUZZ = "test_fuzz.py::test_no_input_stops_a_worker_or_a_command"
SHUTDOWN = "test_shutdown.py::test_a_host_ends_as_the_table_says"
LEAKS = "test_leaks.py::test_a_job_finds_nothing_of_the_one_before"

# ── The bugs ──────────────────────────────────────────────────────────────────────────────────────────────

TOKEN = "              AND job.locked_by = given.token\n"
TOKEN_OR_NONE = "              AND job.locked_by IS NOT DISTINCT FROM given.token\n"
ATTEMPTS = "              AND job.attempts = given.attempts\n"

SWEEP_BY_IDS = """
SWEEP_BY_IDS = \"\"\"
UPDATE background_jobs
   SET status = 'queued', run_at = statement_timestamp(), locked_at = NULL, locked_by = NULL
 WHERE id = ANY (%(ids)s)
\"\"\"


def sweep_by_ids(cursor, settlements):
    cursor.execute(SWEEP_BY_IDS, {"ids": [claim.id for claim, _ in settlements]})
    return {claim.id for claim, _ in settlements}


def sweep(
"""

MUTANTS: dict[str, Mutant] = {
    # Who may write.
    "no token in the guard": Mutant(
        "a stale holder writes",
        (Change("sql.py", TOKEN, "", "COMPLETE"), Change("sql.py", TOKEN_OR_NONE, "", "SETTLE")),
        INTERLEAVINGS,
    ),
    "a guard by status alone": Mutant(
        "a stale holder writes",
        (
            Change("sql.py", TOKEN + ATTEMPTS, "", "RENEW"),
            Change("sql.py", TOKEN + ATTEMPTS, "", "COMPLETE"),
            Change("sql.py", TOKEN_OR_NONE + ATTEMPTS, "", "SETTLE"),
            Change("sql.py", TOKEN.replace("    A", "A") + ATTEMPTS.replace("    A", "A"), "", "HELD"),
        ),
        ZOMBIES,
    ),
    "an atomic completion without a guard": Mutant(
        "a stale holder writes",
        (
            Change(
                "sql.py",
                "   AND job.locked_by = %(token)s\n   AND job.attempts = %(attempts)s\n",
                "",
                "COMPLETE_OWN",
            ),
        ),
        INTERLEAVINGS,
    ),
    "a refused outcome is believed": Mutant(
        "a stale holder writes",
        (
            Change(
                "supervisor.py",
                "            if held.claim.id in report.settled:\n",
                "            if True:\n",
            ),
        ),
        LOCKED_ROWS,
    ),
    # Sweeping.
    "a sweep by collected ids": Mutant(
        "the sweep acts on an old picture",
        (
            Change(
                "sql.py", "\n LIMIT %(limit)s\n   FOR UPDATE SKIP LOCKED\n", "\n LIMIT %(limit)s\n", "LOST"
            ),
            Change(
                "store.py", "return bool(cursor.fetchone()[0])\n\n\ndef leases", "return True\n\n\ndef leases"
            ),
            Change("maintenance.py", "\ndef sweep(\n", SWEEP_BY_IDS),
            Change(
                "maintenance.py", "store.settle(cursor, settlements)", "sweep_by_ids(cursor, settlements)"
            ),
        ),
        RACES,
    ),
    "a sweep that does not look whether the claim still holds": Mutant(
        "the sweep acts on an old picture",
        (
            Change(
                "sql.py", "\n LIMIT %(limit)s\n   FOR UPDATE SKIP LOCKED\n", "\n LIMIT %(limit)s\n", "LOST"
            ),
            Change("maintenance.py", "\ndef sweep(\n", SWEEP_BY_IDS),
            Change(
                "maintenance.py", "store.settle(cursor, settlements)", "sweep_by_ids(cursor, settlements)"
            ),
        ),
        INTERLEAVINGS,
    ),
    "jobs to run at most once are swept into the queue": Mutant(
        "a job runs twice that must not",
        (Change("lifecycle.py", "case Lost(error) if facts.rerun_if_lost:", "case Lost(error) if True:"),),
        AT_MOST_ONCE_STORM,
    ),
    # Renewing.
    "renewals that stop after an error": Mutant(
        "a healthy job is taken for dead",
        (
            Change(
                "supervisor.py",
                "        if turn.renewals or turn.announce:\n            self.next_renewal = 0.0\n",
                "        if turn.renewals or turn.announce:\n            self.next_renewal = NEVER\n",
            ),
        ),
        OUTAGES,
    ),
    # Counting.
    "attempts counted at the failure": Mutant(
        "a job that kills its worker is run for ever",
        (
            Change("sql.py", "LEAST(job.attempts, 2147483646) + 1", "job.attempts", "CLAIM"),
            Change(
                "sql.py",
                "job.attempts - held.refund",
                "job.attempts + CASE WHEN held.error IS NULL THEN 0 ELSE 1 END",
                "SETTLE",
            ),
        ),
        POISON,
    ),
    "crashes of an executor that are not counted": Mutant(
        "a job that kills its worker is run for ever",
        (Change("lifecycle.py", "verdict.delay, error=error, crashed=True", "verdict.delay, error=error"),),
        POISON,
    ),
    "one attempt too many": Mutant(
        "a job that fails is run for ever",
        (
            Change(
                "lifecycle.py",
                "if facts.attempts >= facts.max_attempts:",
                "if facts.attempts > facts.max_attempts:",
            ),
        ),
        MODEL,
    ),
    "jobs that never started are taken for crashed": Mutant(
        "a job pays for what it did not do",
        (
            Change(
                "supervisor.py",
                "        if not held.started:\n            return Unstarted()\n        if held.abort",
                "        if held.abort",
            ),
        ),
        KILL_POINTS,
    ),
    # Claiming.
    "a claim that does not lock": Mutant(
        "the claim takes what another has",
        (
            Change(
                "sql.py",
                "LIMIT %(limit)s\n              FOR UPDATE SKIP LOCKED) AS ready",
                "LIMIT %(limit)s) AS ready",
                "CLAIM",
            ),
        ),
        INTERLEAVINGS,
    ),
    "a claim of more rows than were asked for": Mutant(
        "the claim takes too much",
        (Change("sql.py", "AS ready\n     LIMIT %(limit)s\n", "AS ready\n", "CLAIM"),),
        STATEFUL,
    ),
    "no limit to when a job may start": Mutant(
        "a job starts whose claim was lost",
        (Change("executor.py", "return clock() < assignment.start_by", "return True"),),
        LATE_STARTS,
    ),
    "a claim whose answer was lost is kept": Mutant(
        "claims that nobody knows of",
        (Change("supervisor.py", "self.unanswered_claims.append(turn.token)", "pass"),),
        LOST_ANSWERS,
    ),
    # Clocks.
    "claims by Python's clock": Mutant(
        "clocks that differ",
        (
            Change("sql.py", "AND job.run_at <= statement_timestamp()", "AND job.run_at <= %(now)s", "CLAIM"),
            Change(
                "store.py",
                '            "worker_id": worker_id,\n',
                '            "worker_id": worker_id,\n            "now": datetime.now().astimezone(),\n',
            ),
        ),
        CLOCKS,
    ),
    "delays by Python's clock": Mutant(
        "clocks that differ",
        (
            Change(
                "sql.py",
                "statement_timestamp() + %(delay)s::interval",
                "%(now)s + %(delay)s::interval",
                "ENQUEUE",
            ),
            Change(
                "store.py",
                'new._asdict() | {"payload": payload}',
                'new._asdict() | {"payload": payload, "now": datetime.now().astimezone()}',
            ),
        ),
        CLOCKS,
    ),
    # Listening. Without the second change the polls of a host that does not hear would find the job.
    "LISTEN after the first look at the queue": Mutant(
        "lost wake-ups",
        (
            Change(
                "wakeup.py", "            self.notified = True  # what was created before was not heard\n", ""
            ),
            Change(
                "polling.py",
                "self._poll_interval if hears else min(self._poll_interval, DEAF_POLL)",
                "self._poll_interval",
            ),
        ),
        UNHEARD,
    ),
    "a listener that never reconnects": Mutant(
        "a deaf listener",
        (
            Change(
                "wakeup.py",
                "self._next_try = clock() + pause * random.uniform(0.5, 1.0)",
                "self._next_try = NEVER",
            ),
        ),
        DEAF,
    ),
    "statements prepared behind a pooler": Mutant(
        "poolers",
        (
            Change(
                "database.py",
                "if not self._prepares or is_pooled(self._connection):",
                "if not self._prepares:",
            ),
        ),
        POOLER,
    ),
    # Lock order.
    "wishes to stop that lock in any order": Mutant(
        "deadlocks",
        (
            Change(
                "sql.py",
                "     ORDER BY job.id\n       FOR UPDATE\n",
                "     ORDER BY array_position(%(ids)s::bigint[], job.id)\n       FOR UPDATE\n",
                "REQUEST_STOP",
            ),
        ),
        RACES,
    ),
    "retries that lock in any order": Mutant(
        "deadlocks",
        (
            Change(
                "sql.py",
                "     ORDER BY job.id\n       FOR UPDATE SKIP LOCKED\n",
                "     ORDER BY array_position(%(ids)s::bigint[], job.id)\n       FOR UPDATE\n",
                "RETRY",
            ),
        ),
        RACES,
    ),
    # What bodies do.
    "NUL in the text of an error": Mutant(
        "what cannot be stored",
        (Change("payload.py", "(*range(32), *range(127, 160))", "(*range(1, 32), *range(127, 160))"),),
        FUZZ,
    ),
    "a swallowed BaseException": Mutant(
        "strange exceptions",
        (
            Change(
                "execution.py",
                "            raise  # somebody pressed Ctrl-C in a test or a debugger\n        error =",
                "            raise\n        if not isinstance(error, Exception):\n"
                "            return Completed()\n        error =",
            ),
        ),
        FUZZ,
    ),
    "jobs that share a context": Mutant(
        "what one job leaves to the next",
        (
            Change(
                "execution.py",
                "context.run(run, body, abort, running, claim)",
                "run(body, abort, running, claim)",
            ),
        ),
        LEAKS,
    ),
    # Transactions.
    "enqueueing in a transaction of its own": Mutant(
        "a job without its transaction",
        (
            Change(
                "store.py",
                "    with connections[using].cursor() as cursor:\n        cursor.execute(sql.ENQUEUE,",
                "    with connections[using].copy().cursor() as cursor:\n        cursor.execute(sql.ENQUEUE,",
            ),
        ),
        ATOMICITY,
    ),
    # Stopping and killing.
    "a host that gives no grace": Mutant(
        "deploys",
        (Change("supervisor.py", "self.stop_by = clock() + grace", "self.stop_by = clock()"),),
        SHUTDOWN,
    ),
    "a release after a kill that was not awaited": Mutant(
        "a job runs in two places",
        (
            Change(
                "children.py",
                "return [child for child in self if child.exit is not None or ",
                "return [child for child in self if child.exit is not None or child._doomed or ",
            ),
        ),
        KILLED,
    ),
}
