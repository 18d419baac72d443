"""Schedules in the admin: who may do what, what a form refuses, and what hostile rows do to the pages."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo

import pytest
from django.contrib.admin.models import LogEntry
from django.contrib.admin.utils import quote
from django.contrib.auth.models import Permission, User
from django.contrib.messages import get_messages
from django.db.models.signals import pre_save
from django.test import Client
from django.test.utils import override_settings

from django_pgjobs import Schedule, job, jobs, store
from django_pgjobs.models import BackgroundJob, BackgroundSchedule
from django_pgjobs.ticking import Ticker
from tests.sessions import session

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("own_registry")]

PAGES = "/admin/django_pgjobs/backgroundschedule/"
HOUR = timedelta(hours=1)
VIEW = "view_backgroundschedule"

FORM = {
    "name": "nightly",
    "job_name": "shop.report",
    "cron": "0 3 * * *",
    "interval": "",
    "timezone": "Europe/Vienna",
    "args": '["north"]',
    "kwargs": '{"days": 7}',
    "missed": "skip",
}


@pytest.fixture
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jobs, "registry", {})

    @job(name="shop.report", schedule=Schedule(HOUR, args=["south"]))
    def report(region: str = "all", *, days: int = 1) -> None: ...

    @job(name="shop.unique", unique=lambda: "key")
    def unique() -> None: ...


def client_of(name: str, *permissions: str, superuser: bool = False) -> Client:
    user = User.objects.create(username=name, is_staff=True, is_superuser=superuser)
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


@pytest.fixture
def root(db: None) -> Client:
    return client_of("root", superuser=True)


def declare() -> BackgroundSchedule:
    """The schedule of the code, as a worker host has written it down."""
    with store.own_transaction("default") as cursor:
        Ticker().tick(cursor)
    return row("shop.report")


def make(name: str = "nightly", **columns: Any) -> BackgroundSchedule:
    BackgroundSchedule.objects.create(name=name, **({"job_name": "shop.report", "interval": HOUR} | columns))
    return row(name)


def row(name: str = "nightly") -> BackgroundSchedule:
    return BackgroundSchedule.objects.get(pk=name)


def page_of(name: str) -> str:
    return f"{PAGES}{quote(name)}/change/"


def post(client: Client, url: str, **data: Any) -> list[str]:
    response = client.post(url, data)
    assert response.status_code == 302, response.content.decode()
    said = [str(message) for message in get_messages(response.wsgi_request)]
    client.cookies.pop("messages", None)  # or they would be said once more
    return said


def logged() -> list[tuple[str, str | None, str]]:
    entries = LogEntry.objects.select_related("user").order_by("id")
    return [(entry.user.username, entry.object_id, entry.get_change_message()) for entry in entries]


# Editing


@pytest.mark.django_db(transaction=True)
def test_two_people_add_a_schedule_of_one_name(root: Client) -> None:
    def add_the_same(**kwargs: Any) -> None:
        pre_save.disconnect(add_the_same, sender=BackgroundSchedule)
        with session() as other:
            other.execute(
                "INSERT INTO background_schedules (name, job_name, interval)"
                " VALUES ('nightly', 'x', '1 hour')"
            )

    pre_save.connect(add_the_same, sender=BackgroundSchedule)
    response = root.post(f"{PAGES}add/", FORM)
    assert response.status_code == 200
    assert "There is a schedule named &#x27;nightly&#x27; already." in response.content.decode()
    assert row().job_name == "x"
    assert logged() == []


def test_a_schedule_is_made_in_a_form(root: Client) -> None:
    before = store.now("default")
    post(root, f"{PAGES}add/", **FORM, overlap="on")
    made = row()
    assert (made.job_name, made.cron, made.interval) == ("shop.report", "0 3 * * *", None)
    assert made.payload == {"args": ["north"], "kwargs": {"days": 7}}
    assert (made.timezone, made.missed, made.overlap) == ("Europe/Vienna", "skip", True)
    assert (made.enabled, made.declared, made.changed_by, made.last_tick) == (True, False, "root", None)
    assert made.next_tick_at == made.timing.next(before)
    assert logged() == [("root", "nightly", "Added.")]


def test_the_name_is_that_of_the_job_unless_given(root: Client) -> None:
    jobs.registry.pop("shop.report")

    @job(name="shop.report")
    def report(*args: Any, **kwargs: Any) -> None: ...

    post(root, f"{PAGES}add/", **FORM | {"name": "", "cron": "", "interval": "90", "timezone": "Asia/Tokyo"})
    made = row("shop.report")
    assert (made.cron, made.interval, made.timezone, made.overlap) == ("", timedelta(seconds=90), "", False)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"job_name": "os.system"}, "is not one of the available choices"),
        ({"job_name": "shop.gone"}, "is not one of the available choices"),
        ({"job_name": "shop.unique", "args": "", "kwargs": ""}, "This job cannot have a schedule"),
        ({"name": "shop.report"}, "There is a schedule named &#x27;shop.report&#x27; already."),
        ({"name": "taken"}, "There is a schedule named &#x27;taken&#x27; already."),
        ({"name": "a\tb"}, "The name of a schedule must be a text"),
        ({"name": "x" * 201}, "at most 200 characters"),
        ({"cron": "every day"}, "must have five fields"),
        ({"cron": "61 * * * *"}, "cannot be read (Bad minute)"),
        ({"cron": ""}, "Give either a cron text or an interval."),
        ({"interval": "60"}, "Give either a cron text or an interval."),
        ({"cron": "", "interval": "0.5"}, "it must be from a second to ten years."),
        ({"cron": "", "interval": "-60"}, "it must be from a second to ten years."),
        ({"cron": "", "interval": "9999999 00:00:00"}, "it must be from a second to ten years."),
        ({"cron": "", "interval": "9" * 30 + " 00:00:00"}, "errorlist"),
        ({"timezone": "Mars/Phobos"}, "is not one of the available choices"),
        ({"missed": "never"}, "is not one of the available choices"),
        ({"args": "north"}, "This is not JSON"),
        ({"args": "{}"}, "This must be a JSON array"),
        ({"args": "[" * 100_000}, "This is not JSON"),
        ({"args": "[" + "9" * 5000 + "]"}, "This is not JSON"),
        ({"args": "[NaN]"}, "args[0]"),
        ({"args": '["\\u0000"]'}, "args[0]"),
        ({"args": "[1, 2, 3]"}, "too many positional arguments"),
        ({"kwargs": "[]"}, "This must be a JSON object"),
        ({"kwargs": '{"weeks": 1}'}, "unexpected keyword argument"),
        ({"args": '["' + "x" * 1_100_000 + '"]'}, "The arguments take more than"),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, dict) else "",
)
def test_what_cannot_work_is_refused_by_the_form(root: Client, changes: dict[str, str], problem: str) -> None:
    make("taken")
    response = root.post(f"{PAGES}add/", FORM | changes)
    assert response.status_code == 200
    assert problem in response.content.decode()
    assert BackgroundSchedule.objects.count() == 1
    assert logged() == []


def test_changing_leaves_alone_what_hosts_write(root: Client) -> None:
    tick = datetime(2026, 1, 1, tzinfo=UTC)
    made = make(cron="0 3 * * *", interval=None, timezone="Europe/Vienna", last_tick=tick, next_tick_at=tick)
    post(root, page_of("nightly"), **FORM)
    same_times = row()
    assert (same_times.last_tick, same_times.next_tick_at) == (tick, tick)
    assert (same_times.missed, same_times.overlap, same_times.changed_by) == ("skip", False, "root")
    assert same_times.updated_at > made.updated_at
    post(root, page_of("nightly"), **FORM | {"cron": "0 4 * * *", "name": "another"})
    other_times = row()
    assert other_times.last_tick == tick
    assert other_times.next_tick_at == other_times.timing.next(other_times.updated_at)
    assert BackgroundSchedule.objects.count() == 1


def test_the_form_shows_what_is_stored(root: Client) -> None:
    post(root, f"{PAGES}add/", **FORM)
    page = root.get(page_of("nightly")).content.decode()
    assert "[&quot;north&quot;]</textarea>" in page
    assert "{&quot;days&quot;: 7}</textarea>" in page
    assert '<option value="Europe/Vienna" selected>' in page


def test_a_job_of_a_former_name_can_be_kept(root: Client) -> None:
    jobs.registry["old"] = jobs.registry["shop.report"]
    make(job_name="old")
    post(root, page_of("nightly"), **FORM | {"job_name": "old"})
    assert row().job_name == "old"


def test_schedules_of_people_can_be_deleted_and_those_of_the_code_when_it_drops_them(root: Client) -> None:
    make()
    declared = declare()
    assert root.post(f"{PAGES}shop.report/delete/", {"post": "yes"}).status_code == 403
    data = {"action": "delete_selected", "_selected_action": ["nightly", "shop.report"], "post": "yes"}
    assert root.post(PAGES, data).status_code == 403
    assert BackgroundSchedule.objects.count() == 2
    post(root, f"{PAGES}nightly/delete/", post="yes")
    jobs.registry.clear()
    assert "does not declare this schedule any more" in root.get(page_of(declared.name)).content.decode()
    post(root, f"{PAGES}{quote(declared.name)}/delete/", post="yes")
    assert BackgroundSchedule.objects.count() == 0


def test_schedules_of_the_code_cannot_be_changed(root: Client) -> None:
    before = declare()
    page = root.get(page_of(before.name)).content.decode()
    assert "<textarea" not in page
    assert root.post(page_of(before.name), FORM).status_code == 403
    assert row(before.name).interval == HOUR


# Acts


def test_a_schedule_is_disabled_and_enabled(root: Client) -> None:
    declare()
    assert post(root, f"{PAGES}shop.report/disable/") == ["shop.report: disabled."]
    assert (row("shop.report").enabled, row("shop.report").changed_by) == (False, "root")
    assert post(root, f"{PAGES}shop.report/disable/") == [
        "shop.report: not disabled. It is disabled already, or no longer exists."
    ]
    assert post(root, f"{PAGES}shop.report/enable/") == ["shop.report: enabled."]
    after = row("shop.report")
    assert after.enabled
    assert after.next_tick_at == after.timing.next(after.updated_at)  # what was missed is not made up for
    assert logged() == [("root", "shop.report", "Disabled."), ("root", "shop.report", "Enabled.")]


def test_running_now_enqueues_a_job_and_moves_nothing(root: Client) -> None:
    before = declare()
    (said,) = post(root, f"{PAGES}shop.report/run/")
    made = BackgroundJob.objects.get()
    assert said == f"shop.report: enqueued job {made.pk}."
    assert (made.job_name, made.payload) == ("shop.report", {"args": ["south"], "kwargs": {}})
    assert made.metadata == {"schedule": "shop.report"}
    after = row("shop.report")
    assert (after.last_tick, after.next_tick_at) == (before.last_tick, before.next_tick_at)
    assert logged() == [("root", "shop.report", f"Enqueued job {made.pk}.")]


def test_running_now_is_refused_in_a_sentence(root: Client) -> None:
    make("alone", overlap=False)
    make("unknown", job_name="shop.gone")
    make("unfit", payload={"args": [1, 2, 3]})
    post(root, f"{PAGES}alone/run/")
    assert post(root, f"{PAGES}alone/run/") == ["alone: not run. An earlier job of it waits or runs."]
    assert post(root, f"{PAGES}unknown/run/") == [
        "unknown: not run. No job function is named 'shop.gone' here."
    ]
    assert "too many positional arguments" in post(root, f"{PAGES}unfit/run/")[0]
    assert BackgroundJob.objects.count() == 1


def test_several_are_acted_on_at_once(root: Client) -> None:
    for name in ("a", "b", "c"):
        make(name)
    make("d", cron="bad", interval=None, enabled=False)
    for action, count in (("disable_schedules", 3), ("enable_schedules", 3), ("run_schedules", 4)):
        data = {"action": action, "_selected_action": ["a", "b", "c", "d"]}
        assert len(post(root, PAGES, **data)) == 4
        done = LogEntry.objects.count()
        assert done == count
        LogEntry.objects.all().delete()
    assert BackgroundJob.objects.count() == 4


@pytest.mark.parametrize(
    ("permission", "allowed"),
    [
        ("enable_schedule", {"enable", "disable"}),
        ("run_schedule", {"run"}),
        ("add_backgroundschedule", {"add"}),
        ("change_backgroundschedule", {"change"}),
        ("delete_backgroundschedule", {"delete"}),
    ],
)
def test_each_act_has_its_own_permission(permission: str, allowed: set[str]) -> None:
    client = client_of("ada", VIEW, permission)
    for act in ("enable", "disable", "run", "add", "change", "delete"):
        BackgroundSchedule.objects.all().delete()
        make("one", enabled=act != "enable")
        url = f"{PAGES}add/" if act == "add" else f"{PAGES}one/{act}/"
        response = client.post(url, {**FORM, "post": "yes"})
        assert response.status_code == (302 if act in allowed else 403), act
    make("other")
    page = client.get(page_of("other")).content.decode()
    assert ("/disable/" in page) == ("disable" in allowed)
    assert ("/run/" in page) == ("run" in allowed)
    assert ("<textarea" in page) == ("change" in allowed)
    listed = client.get(PAGES).content.decode()
    assert ("enable_schedules" in listed) == ("enable" in allowed)
    assert ("delete_selected" in listed) == ("delete" in allowed)


def test_who_may_not_look_may_not_act() -> None:
    make()
    for client in (client_of("bob", "enable_schedule", "run_schedule"), Client()):
        for act in ("enable", "disable", "run"):
            assert client.post(f"{PAGES}nightly/{act}/").status_code in (302, 403)
        assert client.get(PAGES).status_code in (302, 403)
    assert row().enabled
    assert BackgroundJob.objects.count() == 0


def test_acts_need_a_post_and_a_token(root: Client) -> None:
    make()
    for act in ("enable", "disable", "run"):
        assert root.get(f"{PAGES}nightly/{act}/").status_code == 405
    careful = Client(enforce_csrf_checks=True)
    careful.force_login(User.objects.get(username="root"))
    assert careful.post(f"{PAGES}nightly/run/").status_code == 403
    assert BackgroundJob.objects.count() == 0


def test_what_cannot_be_logged_does_not_happen(root: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    make()

    def fail(*args: Any) -> None:
        raise RuntimeError("no log")

    monkeypatch.setattr(LogEntry.objects, "log_actions", fail)
    for act in ("disable", "run"):
        with pytest.raises(RuntimeError, match="no log"):
            root.post(f"{PAGES}nightly/{act}/")
    assert row().enabled
    assert BackgroundJob.objects.count() == 0


@pytest.mark.parametrize("name", ["gone", "x\0y", "_", "a/b", "é" * 300, "__2F"])
def test_a_schedule_that_is_not_there_is_no_server_error(root: Client, name: str) -> None:
    assert root.post(f"{PAGES}{quote(name)}/run/").status_code == 404
    assert root.get(page_of(name)).status_code in (302, 404)


def test_a_selection_of_what_is_no_name_changes_nothing(root: Client) -> None:
    data = {"action": "disable_schedules", "_selected_action": ["x\0y"]}
    assert post(root, PAGES, **data) == ["The selection has something that is no schedule."]


# Looking


def test_the_page_shows_the_next_five_times_by_the_clock_of_the_zone(root: Client) -> None:
    post(root, f"{PAGES}add/", **FORM)
    page = root.get(page_of("nightly")).content.decode()
    zone = ZoneInfo("Europe/Vienna")
    made = row()
    tick = made.next_tick_at
    for _ in range(5):
        assert tick is not None
        assert f"{tick.astimezone(zone):%a %Y-%m-%d %H:%M:%S %Z}" in page
        tick = made.timing.next(tick)
    assert tick is not None
    assert f"{tick.astimezone(zone):%Y-%m-%d}" not in page


def test_the_list_tells_what_goes_on(root: Client) -> None:
    declare()
    make("off", enabled=False)
    make("unknown", job_name="shop.gone")
    make("rests", declared=True)
    listed = root.get(PAGES).content.decode()
    for text in (">enabled<", ">disabled<", ">unknown job<", ">not in the code<", "every 1:00:00"):
        assert text in listed


HOSTILE: dict[str, dict[str, Any]] = {
    "<script>alert(1)</script>": {"job_name": "<b>", "changed_by": "<i>who", "missed": "all"},
    "bad cron": {"cron": "<u>", "interval": None},
    "bad zone": {"cron": "* * * * *", "interval": None, "timezone": "<em>"},
    "no arguments": {"payload": 5},
    "wrong arguments": {"payload": {"args": {"<s>": 1}}},
    "many": {"payload": {"args": ["x" * 2_000_000]}},
    "far": {
        "last_tick": datetime(9999, 12, 29, tzinfo=UTC),
        "next_tick_at": datetime(9999, 12, 30, tzinfo=UTC),
    },
    "long ago": {"last_tick": datetime(1, 1, 2, tzinfo=UTC), "interval": timedelta(days=3650)},
    "\x1b[31m / ? # %": {},
}


@pytest.mark.parametrize("zone", ["UTC", "Pacific/Kiritimati", "America/Los_Angeles"])
def test_hostile_rows_are_escaped_and_have_pages(root: Client, zone: str) -> None:
    for name, columns in HOSTILE.items():
        make(name, **columns)
    with override_settings(TIME_ZONE=zone):
        for url in (PAGES, *map(page_of, HOSTILE)):
            response = root.get(url)
            assert response.status_code == 200, url
            page = response.content.decode()
            assert len(page) < 400_000, url
            for raw in ("<script>alert", "<b>", "<i>who", "<u>", "<em>", "<s>"):
                assert raw not in page
        assert "must have five fields" in root.get(page_of("bad cron")).content.decode()


def test_no_page_has_an_inline_script_or_style(root: Client) -> None:
    declare()
    make()
    for url in (PAGES, f"{PAGES}add/", page_of("nightly"), page_of("shop.report")):
        page = root.get(url).content.decode()
        assert " style=" not in page
        assert "<style" not in page
        assert " onclick=" not in page
        for script in page.split("<script")[1:]:
            tag, _, body = script.partition(">")
            assert "src=" in tag or "application/json" in tag or 'type="text/plain"' in tag, script[:200]
            assert "src=" not in tag or not body.partition("</script>")[0].strip()
