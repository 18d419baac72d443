"""What people do not get to see: wherever a secret of a job may occur, it does not."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Iterator
from datetime import timedelta
from html import unescape
from typing import Any

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.auth.models import User
from django.core.management import call_command
from django.test import Client

from django_pgjobs import job, jobs
from django_pgjobs.models import BackgroundJob, BackgroundSchedule
from django_pgjobs.payload import clean_text
from django_pgjobs.redaction import HIDDEN, MOST_SECRETS, Redacted
from django_pgjobs.testing import drain
from tests.factories import make_job

ADMIN = "/admin/django_pgjobs/"
SECRET = "sEcReT-4711"


def redacted(*args: Any, job_name: str = "tests.jobs.sign_in", **kwargs: Any) -> Redacted:
    return Redacted(job_name, json.dumps({"args": args, "kwargs": kwargs}))


# By name


def test_positional_arguments_have_the_names_of_the_parameters() -> None:
    assert redacted("ada", SECRET).payload == {"args": ["ada", HIDDEN], "kwargs": {}}


def test_names_are_looked_for_at_any_depth() -> None:
    shown = redacted("ada", card={"digits": [1, {"Api-Key": {"a": SECRET}, "apiKey": [SECRET], "id": 7}]})
    assert shown.payload["kwargs"] == {
        "card": {"digits": [1, {"Api-Key": HIDDEN, "apiKey": HIDDEN, "id": 7}]}
    }


def test_that_something_is_absent_or_true_is_no_secret() -> None:
    shown = redacted("ada", None, has_password=True, password_hint="", token=0)
    assert shown.payload == {
        "args": ["ada", None],
        "kwargs": {"has_password": True, "password_hint": HIDDEN, "token": HIDDEN},
    }


def test_positional_arguments_without_a_name_are_hidden() -> None:
    assert redacted(1, 2, 3, job_name="shop.gone", note=4).payload == {
        "args": [HIDDEN] * 3,
        "kwargs": {"note": 4},
    }
    assert redacted("ada", SECRET, "one too many").payload["args"] == ["ada", HIDDEN, HIDDEN]


@pytest.mark.parametrize(
    ("pattern", "name"),
    [("iban", "IBAN"), ("api_key", "x"), ("*key", "primary-key"), ("c?v", "cvv"), ("[ab]", "[ab]")],
)
def test_patterns(settings: Any, pattern: str, name: str) -> None:
    settings.PGJOBS = {"REDACT": [pattern]}
    hidden = redacted("ada", "open", **{name: 123456}).payload["kwargs"][name] == HIDDEN
    assert hidden is (pattern not in ("api_key", "c?v") or name == "cvv")


# By the job's own word


@pytest.fixture
def visit() -> Iterator[Callable[..., None]]:
    """Makes a job function whose `redact` is given."""

    def declare(redact: Any) -> None:
        job(name="clinic.visit", redact=redact)(lambda who, note=None, password=None: None)

    yield declare
    jobs.registry.pop("clinic.visit", None)


def seen(*args: Any, **kwargs: Any) -> Redacted:
    return redacted(*args, job_name="clinic.visit", **kwargs)


def test_a_job_says_itself_which_of_its_values_are_secret(visit: Callable[..., None], settings: Any) -> None:
    visit(lambda who, note, password: [who, note["private"]])
    note = {"private": ["diabetes", 42], "open": {"age": 42, "years": 420, "also": "diabetes"}}
    for names in (["*password*"], []):
        settings.PGJOBS = {"REDACT": names}
        shown = seen("ada", note=note, password="blue sky")
        assert shown.payload["args"] == [HIDDEN]
        assert shown.payload["kwargs"]["note"] == {
            "private": [HIDDEN, HIDDEN],
            "open": {"age": HIDDEN, "years": 420, "also": HIDDEN},
        }
        assert shown.payload["kwargs"]["password"] == (HIDDEN if names else "blue sky")
        assert shown.value({"found": "diabetes", "count": 42, "name": "adam"}) == {
            "found": HIDDEN, "count": HIDDEN, "name": "adam"
        }  # fmt: skip
        assert shown.text("ValueError: diabetes!") == f"ValueError: {HIDDEN}!"


@pytest.mark.parametrize("told", [None, (), [], [None], [True], [""], ""])
def test_a_job_may_have_no_secret(visit: Callable[..., None], told: Any) -> None:
    visit(lambda who, note=None: told)
    assert seen("ada", note=[True, ""]).payload == {"args": ["ada"], "kwargs": {"note": [True, ""]}}


@pytest.mark.parametrize("told", ["ada", {"who": "ada"}, {"ada"}, ("ada",), iter(["ada"]), [["ada"]]])
def test_what_a_job_says_may_have_any_form(visit: Callable[..., None], told: Any) -> None:
    visit(lambda who, note=None: told)
    assert seen("ada", note="a d").payload == {"args": [HIDDEN], "kwargs": {"note": "a d"}}


@pytest.mark.parametrize("settings_of_names", [[], ["*password*"]])
def test_where_a_job_cannot_say_it_nothing_is_shown(
    visit: Callable[..., None],
    caplog: pytest.LogCaptureFixture,
    settings: Any,
    settings_of_names: list[str],
) -> None:
    settings.PGJOBS = {"REDACT": settings_of_names}

    def fails(who: str, note: Any = None) -> None:
        raise LookupError(who)

    visit(fails)
    for shown in (seen("ada"), seen("ada", another=1), seen()):
        assert shown.payload == HIDDEN
        assert shown.value({"result": "ada"}) == {"result": HIDDEN}
        assert shown.text("KeyError: ada") == HIDDEN
        assert shown.summary("KeyError: ada") == f"KeyError: {HIDDEN}"
    assert "redact= of the job clinic.visit raised LookupError" in caplog.text
    assert "ada" not in caplog.text


def test_arguments_of_which_a_job_cannot_say_what_is_secret_cannot_be_edited(
    visit: Callable[..., None], db: None
) -> None:
    visit(lambda who, note=None: 1 / 0)
    dead = make_job("failed", job_name="clinic.visit", payload={"args": [SECRET]}, last_error=SECRET)
    root = User.objects.create(username="root", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(root)
    page = client.get(f"{ADMIN}deadletter/{dead.pk}/change/")
    assert SECRET not in page.content.decode()
    response = client.get(f"{ADMIN}deadletter/{dead.pk}/edit/", follow=True)
    assert "Nobody can tell which of the arguments are secret" in response.content.decode()
    schedule = BackgroundSchedule.objects.create(
        name="daily", job_name="clinic.visit", cron="0 6 * * *", payload={"args": [SECRET]}
    )
    url = f"{ADMIN}backgroundschedule/daily/change/"
    assert SECRET not in client.get(url).content.decode()
    data = {"job_name": "clinic.visit", "cron": "0 7 * * *", "args": "", "kwargs": "", "missed": "once"}
    response = client.post(url, data)
    assert "Nobody can tell which of the stored arguments are secret." in unescape(response.content.decode())
    schedule.refresh_from_db()
    assert (schedule.payload, schedule.cron) == ({"args": [SECRET]}, "0 6 * * *")


@pytest.mark.parametrize("impossible", [7, "names", ["note"]])
def test_what_says_it_is_a_function(impossible: Any) -> None:
    with pytest.raises(ValueError, match="must be a plain function of the job's arguments"):
        job(name="clinic.visit", redact=impossible)(lambda who: None)

    async def later(who: str) -> list[str]:
        return [who]

    with pytest.raises(ValueError, match="must be a plain function"):
        job(name="clinic.visit", redact=later)(lambda who: None)


def test_nothing_is_hidden_where_nothing_is_to_be(settings: Any) -> None:
    settings.PGJOBS = {"REDACT": []}
    shown = redacted("ada", SECRET)
    assert shown.payload["args"] == ["ada", SECRET]
    assert shown.text(f"password={SECRET}") == f"password={SECRET}"


# In texts


@pytest.mark.parametrize(
    "secret",
    [
        SECRET,
        'it\'s "quoted"',
        "ünïcode ✓✓",
        "line one of it\nline two of it",
        "back\\slash",
        "a b&c=d/ä",
        "12345",
    ],
)
def test_a_hidden_value_is_hidden_in_texts_however_it_is_written(secret: str) -> None:
    shown = redacted("ada", secret)
    for text in (secret, repr(secret), json.dumps(secret), json.dumps(secret, ensure_ascii=False)):
        assert shown.text(f"no luck with {text} today") in (
            f"no luck with {HIDDEN} today", f"no luck with '{HIDDEN}' today", f'no luck with "{HIDDEN}" today'
        )  # fmt: skip
    for line in secret.splitlines():
        assert line not in shown.text(f"    {line}\n")


def test_a_number_is_hidden_in_texts() -> None:
    assert redacted("ada", 48151623).text("PIN 48151623 refused") == f"PIN {HIDDEN} refused"


def test_a_value_with_a_name_of_its_own_in_a_text_is_hidden() -> None:
    shown = redacted("ada", "x")
    for text in (
        f"password={SECRET}", f"password = '{SECRET}'", f'{{"api_key": "{SECRET}"}}', f"?token={SECRET}&id=7",
        f"Authorization: Bearer {SECRET}", f"postgres://ada:{SECRET}@db/shop",
        f'{{\\"token\\": \\"{SECRET}\\"}}',
    ):  # fmt: skip
        assert SECRET not in shown.text(text), text
        assert HIDDEN in shown.text(text)
    assert shown.text("https://shop.example/?id=7: not found") == "https://shop.example/?id=7: not found"


@pytest.mark.parametrize("before", range(700, 760, 7))
def test_the_rest_of_a_secret_that_was_cut_is_hidden(before: int) -> None:
    secret = "".join(f"<{number}>" for number in range(100, 140))
    text = clean_text("." * before + secret + "." * 1500, 1500)
    assert not re.search(r"<\d\d\d>", redacted("ada", secret).text(text))
    assert not re.search(r"<\d\d\d>", redacted("ada", secret).text(text[:740], is_cut=True))


def test_where_secrets_are_not_known_no_text_is_shown() -> None:
    too_many = {"tokens": [f"secret {number}" for number in range(MOST_SECRETS + 1)]}
    deep = '{"args": ' + "[" * 100_000 + "]" * 100_000 + "}"
    for shown in (
        Redacted("tests.jobs.sign_in", None),
        Redacted("tests.jobs.sign_in", "no JSON"),
        Redacted("tests.jobs.sign_in", deep),
        redacted("ada", **too_many),
    ):
        assert shown.text("ValueError: something") == HIDDEN
        assert shown.summary("ValueError: something") == f"ValueError: {HIDDEN}"


def test_many_secrets_and_many_texts_are_not_compared_without_end() -> None:
    secrets = {"tokens": [f"a secret {number}" for number in range(MOST_SECRETS)]}
    shown = redacted("ada", texts=["one"] * 100_000, **secrets)
    texts = shown.payload["kwargs"]["texts"]
    assert (texts[0], texts[-1]) == ("one", HIDDEN)
    assert redacted("ada", **secrets).text(" … [1 characters cut] … " * 1000) == HIDDEN


def test_what_was_left_as_it_was_shown_is_what_is_stored() -> None:
    shown = redacted("ada", SECRET, login={"token": SECRET, "n": 1}, url=f"https://x/{SECRET}")
    kwargs = json.loads(json.dumps(shown.payload["kwargs"]))
    kwargs["login"]["n"] = 2
    assert shown.restored(kwargs, "kwargs") == {
        "login": {"token": SECRET, "n": 2},
        "url": f"https://x/{SECRET}",
    }
    assert shown.restored(["bob", HIDDEN, "new"], "args") == ["bob", SECRET, "new"]
    assert shown.restored([HIDDEN], "args") == [HIDDEN]


# Everywhere


def spread_secrets() -> None:
    """Rows that have the secret wherever a job can have it."""
    arguments = {"args": ["ada", SECRET], "kwargs": {"deep": [{"apiToken": SECRET}]}}
    text = f"ValueError: {SECRET} is refused"
    entry = {
        "at": "2026-01-02T03:04:05+00:00",
        "attempt": 1,
        "exception": "builtins.ValueError",
        "message": f"{SECRET} is refused",
        "traceback": f"Traceback (most recent call last):\n  sign_in('ada', {SECRET!r})\n{text}",
    }
    metadata = {
        "progress": {"done": 1, "total": 2, "message": f"with {SECRET}"},
        "enqueued_by": SECRET, "schedule": SECRET, "tick": SECRET, "context": {"tenant": SECRET},
    }  # fmt: skip
    for number, status in enumerate(("queued", "processing", "failed", "completed", "cancelled", "failed")):
        make_job(
            status, job_name="tests.jobs.sign_in", payload=arguments, last_error=text,
            unique_key=f'{number}{{"password":"{SECRET}"}}',
            errors=[entry], metadata=metadata, result={"said": [SECRET], "password": SECRET},
        )  # fmt: skip
    make_job(
        "failed",
        payload={"args": [[SECRET]] * 300_000},
        job_name="shop.gone",
        last_error=text,
        errors=[entry],
    )
    make_job("failed", payload=SECRET, last_error=text, errors={"password": SECRET})
    BackgroundSchedule.objects.create(
        name="daily", job_name="tests.jobs.sign_in", interval=timedelta(days=1), payload=arguments
    )


def crawl(client: Client, start: str) -> dict[str, str]:
    """Every page of the app that links lead to, by its address; lists once with each set of parameters."""
    pages: dict[str, str] = {}
    seen = set()
    left = [start]
    while left:
        url = left.pop()
        path, _, query = url.partition("?")
        kind = path, frozenset(re.findall(r"(\w+)=", query))
        if kind in seen or len(kind[1]) > 2:
            continue
        seen.add(kind)
        response = client.get(url)
        if response.status_code != 200:
            continue
        pages[url] = response.content.decode()
        for link in re.findall(r'href="([^"#]+)', pages[url]):
            link = unescape(link)
            link = url.partition("?")[0] + link if link.startswith("?") else link
            if link.startswith(ADMIN) and link not in pages:
                left.append(link)
    return pages


@pytest.mark.django_db
def test_no_page_of_the_admin_shows_a_secret(caplog: pytest.LogCaptureFixture, capsys: Any) -> None:
    caplog.set_level(logging.DEBUG)
    root = User.objects.create(username="root", is_staff=True, is_superuser=True)
    client = Client()
    client.force_login(root)
    spread_secrets()
    failed = list(BackgroundJob.objects.filter(status="failed").values_list("pk", flat=True))
    client.post(
        f"{ADMIN}deadletter/",
        {"action": "retry_jobs", "_selected_action": failed[:1], "index": "0", "select_across": "0"},
    )
    call_command("discardjobs", str(failed[1]), "--reason", "tired", "--user", "root")
    call_command("jobstats")
    with pytest.raises(SystemExit):  # there is something to report
        call_command("jobsdoctor", "--json")
    pages = crawl(client, ADMIN)
    kinds = {re.sub(r"\d+", "N", url.partition("?")[0]) for url in pages}
    assert {
        f"{ADMIN}deadletter/groups/", f"{ADMIN}deadletter/N/change/", f"{ADMIN}backgroundjob/N/change/",
        f"{ADMIN}backgroundjob/N/history/", f"{ADMIN}backgroundjob/N/edit/",
        f"{ADMIN}backgroundschedule/daily/change/",
    } <= kinds  # fmt: skip
    assert [url for url, page in pages.items() if SECRET in page] == []
    assert any(HIDDEN in page for page in pages.values())
    assert SECRET not in caplog.text
    assert SECRET not in capsys.readouterr().out
    assert LogEntry.objects.count() == 2
    assert not LogEntry.objects.filter(change_message__contains=SECRET).exists()
    assert BackgroundJob.objects.filter(payload__args__1=SECRET).count() == 6  # the rows stay as they are


@pytest.mark.django_db
def test_a_job_that_fails_with_its_secret_gives_away_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    function = jobs.find("tests.jobs.sign_in")
    assert function is not None
    job = function.using(max_attempts=1).enqueue("ada", SECRET, api_key=SECRET * 200)
    drain()
    job.refresh_from_db()
    assert job.status == "failed"
    assert SECRET in (job.last_error or "")
    page = client.get(f"{ADMIN}deadletter/{job.pk}/change/").content.decode()
    assert "ada could not sign in" in page
    assert "SEcReT"[1:] not in page
    assert SECRET not in caplog.text


@pytest.mark.django_db
def test_a_job_is_retried_with_the_secret_that_the_person_who_edits_it_does_not_see() -> None:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    job = make_job("failed", job_name="tests.jobs.sign_in", payload={"args": ["ada", SECRET]})
    url = f"{ADMIN}deadletter/{job.pk}/edit/"
    form = {
        "args": f'["bob", "{HIDDEN}"]',
        "kwargs": "",
        "reason": "a typo",
        "seen_at": job.updated_at.isoformat(),
    }
    page = client.post(url, form).content.decode()
    assert "<del>-     &quot;ada&quot;,</del>" in page
    assert "hidden values" not in page
    assert SECRET not in page
    assert client.post(url, form | {"confirmed": "yes"}).status_code == 302
    job.refresh_from_db()
    assert job.payload["args"] == ["bob", SECRET]
    other = make_job("failed", job_name="tests.jobs.sign_in", payload={"args": ["ada", SECRET]})
    url, form["seen_at"] = f"{ADMIN}deadletter/{other.pk}/edit/", other.updated_at.isoformat()
    form["args"] = '["ada", "nEw-4712"]'
    assert "hidden values, as they are written now" in client.post(url, form).content.decode()
    client.post(url, form | {"confirmed": "yes"})
    other.refresh_from_db()
    assert other.payload["args"] == ["ada", "nEw-4712"]
    messages = "".join(LogEntry.objects.values_list("change_message", flat=True))
    assert "with other hidden values" in messages
    assert not re.search(f"{SECRET}|nEw-4712", messages)


@pytest.mark.django_db
def test_a_schedule_keeps_its_secret_when_something_else_is_edited() -> None:
    client = Client()
    client.force_login(User.objects.create(username="root", is_staff=True, is_superuser=True))
    spread_secrets()
    url = f"{ADMIN}backgroundschedule/daily/change/"
    page = client.get(url).content.decode()
    fields = dict(re.findall(r'<textarea name="(\w+)"[^>]*>\s*([^<]*)</textarea>', page))
    assert {name: json.loads(unescape(text)) for name, text in fields.items()} == {
        "args": ["ada", HIDDEN],
        "kwargs": {"deep": [{"apiToken": HIDDEN}]},
    }
    form = {"job_name": "tests.jobs.sign_in", "interval": "3600", "missed": "skip", "timezone": ""}
    arguments = {"args": f'["bob", "{HIDDEN}"]', "kwargs": f'{{"deep": [{{"apiToken": "{HIDDEN}"}}]}}'}
    response = client.post(url, form | arguments)
    assert response.status_code == 302, re.findall(r'class="errorlist.*', response.content.decode())
    assert BackgroundSchedule.objects.get().payload == {
        "args": ["bob", SECRET],
        "kwargs": {"deep": [{"apiToken": SECRET}]},
    }
    moved = client.post(
        url, form | {"job_name": "tests.jobs.add"} | {"args": f'["{HIDDEN}", "{HIDDEN}"]', "kwargs": ""}
    )
    assert "stands for a secret of another place or job" in moved.content.decode()
