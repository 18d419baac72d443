from __future__ import annotations

from dataclasses import FrozenInstanceError, fields
from datetime import timedelta

import pytest
from django.core.exceptions import ImproperlyConfigured
from django.test import override_settings

from django_pgjobs.conf import Config, config, read
from django_pgjobs.models import BackgroundJob
from django_pgjobs.router import Router
from tests.models import Effect

DURATIONS = [field.name for field in fields(Config) if "timedelta" in str(field.type)]
RETENTIONS = ["COMPLETED_RETENTION", "FAILED_RETENTION", "CANCELLED_RETENTION"]


def problem_of(given: object) -> str:
    """What the project is told about its settings."""
    with override_settings(PGJOBS=given), pytest.raises(ImproperlyConfigured) as caught:
        config()
    return str(caught.value)


def test_without_settings_the_defaults_apply(settings):
    del settings.PGJOBS

    assert config() == Config() == read({})


def test_the_defaults_have_no_problems():
    assert list(Config().problems()) == []


def test_settings_do_not_change():
    with pytest.raises(FrozenInstanceError):
        config().LEASE = timedelta(1)


@pytest.mark.parametrize("name", DURATIONS)
@pytest.mark.parametrize(
    ("given", "duration"),
    [(30, timedelta(seconds=30)), (0.5, timedelta(seconds=0.5)), (timedelta(hours=1), timedelta(hours=1))],
)
def test_durations_are_seconds_or_timedeltas(name, given, duration):
    assert getattr(read({name: given}), name) == duration


@pytest.mark.parametrize("name", RETENTIONS)
def test_retentions_may_be_none(name):
    assert getattr(read({name: None}), name) is None


@pytest.mark.parametrize(
    ("retention", "deletes"), [(0, True), (timedelta(0), True), (None, False), (1, False), (0.000001, False)]
)
def test_no_retention_deletes_a_job_as_it_completes(retention, deletes):
    assert read({"COMPLETED_RETENTION": retention}).deletes_completed is deletes


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"LEASES": 5}, "PGJOBS has no setting 'LEASES'. Did you mean 'LEASE'?"),
        ({"lease": 5}, "PGJOBS has no setting 'lease'. Did you mean 'LEASE'?"),
        ({"max_atempts": 5}, "PGJOBS has no setting 'max_atempts'. Did you mean 'MAX_ATTEMPTS'?"),
        (
            {"XYZ": 5},
            f"PGJOBS has no setting 'XYZ'. Known: {', '.join(field.name for field in fields(Config))}.",
        ),
        ({5: 5}, f"PGJOBS has no setting 5. Known: {', '.join(field.name for field in fields(Config))}."),
        (None, "PGJOBS must be a dictionary, not NoneType."),
        ([], "PGJOBS must be a dictionary, not list."),
        ({"DATABASE": None}, "PGJOBS['DATABASE'] must be a string, not None."),
        ({"MAX_ATTEMPTS": "3"}, "PGJOBS['MAX_ATTEMPTS'] must be a whole number, not '3'."),
        ({"MAX_ATTEMPTS": 3.0}, "PGJOBS['MAX_ATTEMPTS'] must be a whole number, not 3.0."),
        ({"MAX_ATTEMPTS": True}, "PGJOBS['MAX_ATTEMPTS'] must be a whole number, not True."),
        ({"STRICT_ALIAS": 1}, "PGJOBS['STRICT_ALIAS'] must be True or False, not 1."),
        *(
            ({"LEASE": value}, f"PGJOBS['LEASE'] must be a number of seconds or a timedelta, not {value!r}.")
            for value in ("60", None, True, float("nan"), float("inf"), 10**20)
        ),
        *(
            (
                {"FAILED_RETENTION": value},
                (
                    "PGJOBS['FAILED_RETENTION'] must be a number of seconds or a timedelta, or None, not"
                    f" {value!r}."
                ),
            )
            for value in ("3d", False, float("nan"))
        ),
        (
            {"DATABASE": "nowhere"},
            "PGJOBS: DATABASE is 'nowhere', which is not an alias in DATABASES.",
        ),
        *(
            ({"REDACT": value}, f"PGJOBS['REDACT'] must be a list of strings, not {value!r}.")
            for value in ("password", None, ["password", 7], 7)
        ),
        *(
            (
                {"REDACT": ["token", value]},
                (
                    f"PGJOBS: REDACT has the pattern {value!r}; it must have 1 to 100 characters besides -"
                    " and _, and at most 4 stars."
                ),
            )
            for value in ("", "_-", "*a*a*a*a*", "x" * 101)
        ),
        ({"REDACT": ["a"] * 101}, "PGJOBS: REDACT has 101 patterns; it may have 100."),
        ({"MAX_ATTEMPTS": 0}, "PGJOBS: MAX_ATTEMPTS is 0; it must be from 1 to 1,000,000."),
        ({"MAX_ATTEMPTS": 10**6 + 1}, "PGJOBS: MAX_ATTEMPTS is 1000001; it must be from 1 to 1,000,000."),
        ({"MAX_CRASHES": -1}, "PGJOBS: MAX_CRASHES is -1; it must be from 1 to 1,000,000."),
        ({"MAX_PAYLOAD_BYTES": 0}, "PGJOBS: MAX_PAYLOAD_BYTES is 0; it must be from 1 to 67,108,864."),
        (
            {"MAX_PAYLOAD_BYTES": 2**28},
            "PGJOBS: MAX_PAYLOAD_BYTES is 268435456; it must be from 1 to 67,108,864.",
        ),
        *(
            ({name: value}, f"PGJOBS: {name} is {text}; it must be longer than zero and at most a day.")
            for name in ("LEASE", "SWEEP_INTERVAL", "POLL_INTERVAL", "ALERT_INTERVAL")
            for value, text in ((0, "0:00:00"), (-1, "-1 day, 23:59:59"), (86_401, "1 day, 0:00:01"))
        ),
        *(
            (
                {"TIMEOUT": value},
                f"PGJOBS: TIMEOUT is {text}; it must be longer than zero and at most ten years, or None.",
            )
            for value, text in ((0, "0:00:00"), (-1, "-1 day, 23:59:59"))
        ),
        *(
            ({name: value}, f"PGJOBS: {name} is {text}; it must be from zero to ten years.")
            for name in ("LOST_DELAY", "UNKNOWN_JOB_AFTER", "JOB_CONN_MAX_AGE")
            for value, text in ((-1, "-1 day, 23:59:59"), (timedelta(3651), "3651 days, 0:00:00"))
        ),
        *(
            ({name: value}, f"PGJOBS: {name} is {text}; it must be from zero to ten years, or None.")
            for name in RETENTIONS
            for value, text in ((-1, "-1 day, 23:59:59"), (timedelta.max, str(timedelta.max)))
        ),
    ],
)  # fmt: skip
def test_what_is_wrong_with_the_settings_is_said_in_a_sentence(given, problem):
    assert problem_of(given) == problem


def test_every_problem_is_told():
    assert [*Config(MAX_CRASHES=0, LEASE=timedelta(0)).problems()] == [
        ("MAX_CRASHES", "MAX_CRASHES is 0; it must be from 1 to 1,000,000."),
        ("LEASE", "LEASE is 0:00:00; it must be longer than zero and at most a day."),
    ]


def test_settings_are_read_once_and_again_when_they_change():
    first = config()
    assert config() is first

    with override_settings(PGJOBS={"MAX_CRASHES": 30}):
        assert config().MAX_CRASHES == 30
    assert config() == first


def test_a_problem_is_told_each_time():
    with override_settings(PGJOBS={"LEASE": 0}):
        for _ in range(2):
            with pytest.raises(ImproperlyConfigured):
                config()


def test_an_alias_that_is_gone_is_noticed(settings):
    settings.PGJOBS = {"DATABASE": "other"}
    assert config().DATABASE == "other"

    with pytest.warns(UserWarning, match="Overriding setting DATABASES"):
        settings.DATABASES = {"default": settings.DATABASES["default"]}
    with pytest.raises(ImproperlyConfigured):
        config()


# ── The router ────────────────────────────────────────────────────────────────────────────────────────────


def test_the_router_keeps_the_jobs_on_the_queues_database(settings):
    settings.PGJOBS = {"DATABASE": "other"}
    router = Router()

    assert router.db_for_read(BackgroundJob) == router.db_for_write(BackgroundJob) == "other"
    assert router.allow_migrate("other", "django_pgjobs") is True
    assert router.allow_migrate("default", "django_pgjobs") is False


def test_the_router_has_no_opinion_on_the_projects_own_models():
    router = Router()

    assert router.db_for_read(Effect) is router.db_for_write(Effect) is None
    assert router.allow_migrate("default", "tests") is None
