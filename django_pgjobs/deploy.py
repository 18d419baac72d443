"""Whether this code can run the jobs that other code has enqueued: the deploy guard.

Jobs outlive the code that has enqueued them. So before workers are replaced, the new code is asked whether
it knows the name of each job that waits, and whether its function still takes the arguments. What a function
does with them nobody can tell.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from . import jobs, store

LIMIT = 5000  # jobs from both ends of each queue and priority: more than wait in most tables


class Finding(NamedTuple):
    """Jobs of one name that this code cannot run, all for the same reason."""

    job_name: str
    jobs: int  # among those that were looked at
    example: int  # the id of one
    is_known: bool  # whether there is a job function of this name
    problem: str
    advice: str

    @property
    def subject(self) -> str:
        """The jobs that it is about, in words."""
        jobs = f"job {self.example}" if self.jobs == 1 else f"{self.jobs:,} jobs, for example {self.example}"
        return f"{self.job_name!r}, {jobs}"


class Report(NamedTuple):
    """What a look at the table has come to."""

    looked_at: int
    is_complete: bool  # whether that was all there are
    findings: list[Finding]


def look(cursor: store.Cursor, limit: int = LIMIT) -> Report:
    """What this code cannot run of the jobs that wait and run, where there are many from both ends.

    `limit` is the number of jobs at each end of each queue and priority. What is in between costs nothing.
    """
    return _report(store.live_calls(cursor, limit))


def look_at_dead_letters(cursor: store.Cursor, limit: int = LIMIT) -> Report:
    """What this code could not run of the latest dead letters if they were retried, at most twice `limit`."""
    return _report(store.dead_calls(cursor, limit))


def _report(forms: Sequence[store.CallForm]) -> Report:
    findings: dict[tuple[str, str], Finding] = {}
    for form in forms:
        for finding in _findings(form):
            known = findings.get((finding.job_name, finding.problem))
            if known is not None:
                finding = known._replace(
                    jobs=known.jobs + finding.jobs, example=max(known.example, finding.example)
                )
            findings[finding.job_name, finding.problem] = finding
    return Report(
        looked_at=sum(form.jobs for form in forms),
        is_complete=not any(form.more for form in forms),
        findings=list(findings.values()),
    )


def _findings(form: store.CallForm) -> Iterator[Finding]:
    """Yield what is wrong with jobs of one form: at most one thing."""
    function = jobs.find(form.job_name)

    def finding(problem: str, advice: str) -> Finding:
        known = function is not None
        return Finding(form.job_name, form.jobs, form.latest, known, problem, advice)

    if function is None:
        similar = difflib.get_close_matches(form.job_name, jobs.registry, n=1)
        meant = f" Was it renamed to {similar[0]!r}?" if similar else ""
        yield finding(
            "no job function has this name." + meant,
            f"Let the function that runs them answer to it, with aliases=[{form.job_name!r}]; or keep the old"
            " one until they are done.",
        )
    elif not form.is_call:
        yield finding(
            "the payload is not a call.",
            'Whoever inserts them should write {"args": [...], "kwargs": {...}}.',
        )
    else:
        try:
            function.signature.bind(*[None] * form.args, **dict.fromkeys(form.keywords))
        except TypeError as error:
            yield finding(
                f"the arguments do not fit {function.name}{function.signature}: {error}.",
                "Give new parameters a default, and keep the old ones until these jobs are done.",
            )
