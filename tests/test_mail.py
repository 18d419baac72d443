"""Messages become jobs and reach a real SMTP server, whole, and once as far as SMTP can tell."""

from __future__ import annotations

import smtplib
import socket
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from email import message_from_bytes
from email.message import Message
from email.mime.image import MIMEImage
from email.policy import default
from typing import Any

import django
import pytest
from aiosmtpd.controller import Controller
from aiosmtpd.smtp import SMTP, Envelope, Session
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail import EmailMessage, EmailMultiAlternatives
from django.db import connection, transaction
from django.test.utils import override_settings
from django.utils import translation
from django.utils.translation import gettext_lazy

from django_pgjobs.exceptions import InvalidArguments
from django_pgjobs.lifecycle import Event
from django_pgjobs.mail import BATCH, EmailBackend, as_json, from_json
from django_pgjobs.models import BackgroundJob
from django_pgjobs.testing import Drained, drain
from tests.factories import make_job
from tests.sessions import session

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # Of Django 6.1, where settings other than MAILERS are used.
    pytest.mark.filterwarnings("ignore::PendingDeprecationWarning"),
]

OWN = "django_pgjobs.mail.EmailBackend"
SMTP_BACKEND = "django.core.mail.backends.smtp.EmailBackend"


class Server:
    """Takes mail, and answers with what it is told to, by command."""

    def __init__(self) -> None:
        self.envelopes: list[Envelope] = []
        self.answers: dict[str, list[str]] = {}

    def answer(self, command: str, usual: str) -> str:
        answers = self.answers.get(command)
        return answers.pop(0) if answers else usual

    async def handle_MAIL(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        envelope.mail_from = address
        return self.answer("MAIL", "250 OK")

    async def handle_RCPT(
        self, server: SMTP, session: Session, envelope: Envelope, address: str, options: list[str]
    ) -> str:
        answer = self.answer("RCPT", "250 OK")
        if answer.startswith("250"):
            envelope.rcpt_tos.append(address)
        return answer

    async def handle_DATA(self, server: SMTP, session: Session, envelope: Envelope) -> str:
        answer = self.answer("DATA", "250 OK")
        if answer.startswith("250"):
            self.envelopes.append(envelope)
        return answer

    @property
    def messages(self) -> list[Any]:
        return [message_from_bytes(one.content, policy=default) for one in self.envelopes]  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def controller() -> Iterator[tuple[Server, Controller]]:
    server = Server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    controller = Controller(server, hostname="127.0.0.1", port=port)
    controller.start()
    yield server, controller
    controller.stop()


@pytest.fixture(params=["EMAIL_BACKEND", "MAILERS"])
def smtp(request: pytest.FixtureRequest, controller: tuple[Server, Controller]) -> Iterator[Server]:
    """A real SMTP server that the project sends to, through jobs, in each way to say so."""
    server, where = controller
    server.__init__()  # type: ignore[misc]
    if request.param == "MAILERS":
        if django.VERSION < (6, 1):
            pytest.skip("MAILERS are new in Django 6.1.")
        smtp = {"BACKEND": SMTP_BACKEND, "OPTIONS": {"host": where.hostname, "port": where.port}}
        own = {"BACKEND": OWN, "OPTIONS": {"mailer": "smtp"}}
        given: dict[str, Any] = {"MAILERS": {"default": own, "smtp": smtp}}
    else:
        given = {"EMAIL_BACKEND": OWN, "EMAIL_HOST": where.hostname, "EMAIL_PORT": where.port}
    with override_settings(**given):
        yield server


def a_message(**fields: Any) -> EmailMessage:
    return EmailMessage(**{"subject": "Hi", "body": "Hello", "to": ["ada@example.com"]} | fields)


def rich_message() -> EmailMultiAlternatives:
    message = EmailMultiAlternatives(
        subject=gettext_lazy("Yes"),
        body="Zażółć\n.\nFrom me: " + "long " * 500,
        from_email='"Łódź, Shop" <shop@example.com>',
        to=["ada@example.com", "Bob Ünlü <bob@example.com>"],
        cc=["cc@example.com"],
        bcc=["bcc@example.com"],
        reply_to=["help@example.com", "Sales <sales@example.com>"],
        headers={
            "X-Number": "7",
            "X-Lazy": gettext_lazy("No"),
            "List-Unsubscribe": "<https://example.com/u>",
        },
    )
    message.attach_alternative("<p>Zażółć</p>", "text/html")
    message.attach_alternative("BEGIN:VCALENDAR", "text/calendar")
    message.attach("notes.txt", "Grüße\n", "text/plain")
    message.attach("żółw.pdf", b"%PDF\x00\xff\r\n" * 100, "application/pdf")
    message.attach("no-type", b"\x00\x01")
    message.attach("old.eml", EmailMessage("Inner", "inner body", "a@example.com", ["b@example.com"]),
                   "message/rfc822")  # fmt: skip
    return message


# ── Sending ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_message_is_sent_by_a_job(smtp: Server) -> None:
    assert mail.send_mail("Hi", "Hello\n", "shop@example.com", ["ada@example.com"]) == 1
    assert smtp.envelopes == []
    (job,) = BackgroundJob.objects.all()
    assert (job.job_name, job.queue_name, job.max_attempts) == ("django_pgjobs.mail.send", "default", 20)
    assert drain().completed == 1
    (envelope,) = smtp.envelopes
    assert (envelope.mail_from, envelope.rcpt_tos) == ("shop@example.com", ["ada@example.com"])
    (message,) = smtp.messages
    assert (message["Subject"], message["To"], message.get_content().strip()) == (
        "Hi",
        "ada@example.com",
        "Hello",
    )


def test_a_rich_message_arrives_as_it_would_have_without_a_job(
    smtp: Server, controller: tuple[Server, Controller]
) -> None:
    _, where = controller
    message = rich_message()
    message.extra_headers |= {"Date": "Fri, 02 Jan 2026 00:00:00 +0000", "Message-ID": "<1@example.com>"}
    with translation.override("de"):
        with override_settings(**_direct(where)):
            message.send()
        assert rich_message_like(message).send() == 1
    assert drain().completed == 1
    direct, queued = smtp.envelopes
    assert queued.rcpt_tos == direct.rcpt_tos
    assert queued.rcpt_tos == ["ada@example.com", "bob@example.com", "cc@example.com", "bcc@example.com"]
    assert parts(queued) == parts(direct)
    assert smtp.messages[1]["Subject"] == "Ja"
    assert smtp.messages[1]["X-Lazy"] == "Nein"
    assert "bcc" not in queued.content.decode()  # type: ignore[union-attr]


def _direct(where: Controller) -> dict[str, Any]:
    """Settings that send without a job."""
    if hasattr(django.conf.settings, "MAILERS"):
        return {"MAILERS": {"default": {"OPTIONS": {"host": where.hostname, "port": where.port}}}}
    return {"EMAIL_BACKEND": SMTP_BACKEND}


def rich_message_like(message: EmailMultiAlternatives) -> EmailMultiAlternatives:
    again = rich_message()
    again.extra_headers = message.extra_headers
    return again


def parts(envelope: Envelope) -> list[Any]:
    """All of a message but its boundaries."""

    def walk(part: Any) -> Iterator[Any]:
        headers = [(name, str(value)) for name, value in part.items() if "boundary" not in str(value)]
        yield headers, part.get_content_type(), None if part.is_multipart() else part.get_payload(decode=True)
        for inner in part.get_payload() if part.is_multipart() else ():
            yield from walk(inner)

    found = list(walk(message_from_bytes(envelope.content, policy=default)))  # type: ignore[arg-type]
    return [entry for entry in found if not _is_of_inner(entry)]


def _is_of_inner(entry: Any) -> bool:
    """The attached message gets a date and an id of its own each time that it is built."""
    return ("Subject", "Inner") in entry[0]


def test_attached_parts_arrive(smtp: Server) -> None:
    image = MIMEImage(b"\x89PNG\r\n\x1a\n")
    image.add_header("Content-ID", "<logo>")
    message = a_message()
    message.attachments.append(image)  # which attach() of Django 6.1 warns of
    assert message.send() == 1
    assert drain().errors == []
    _, part = smtp.messages[0].iter_parts()
    assert (part["Content-ID"], part.get_content_type()) == ("<logo>", "image/png")
    assert part.get_payload(decode=True) == b"\x89PNG\r\n\x1a\n"


@pytest.mark.skipif(django.VERSION < (6, 0), reason="New in Django 6.0.")
def test_attached_parts_of_the_modern_kind_arrive(smtp: Server) -> None:
    from email.message import MIMEPart

    part = MIMEPart()
    part.set_content(b"GIF89a", maintype="image", subtype="gif", disposition="inline", cid="<logo>")
    a_message(attachments=[part]).send()
    assert drain().errors == []
    _, arrived = smtp.messages[0].iter_parts()
    assert (arrived["Content-ID"], arrived.get_content()) == ("<logo>", b"GIF89a")


def test_html_and_other_encodings_arrive(smtp: Server) -> None:
    message = a_message(body="<p>é</p>")
    message.content_subtype = "html"
    message.encoding = "iso-8859-1"
    message.send()
    drain()
    (arrived,) = smtp.messages
    assert (arrived.get_content_type(), arrived.get_content_charset()) == ("text/html", "iso-8859-1")
    assert arrived.get_content().strip() == "<p>é</p>"


def test_many_messages_are_one_job_each_all_or_none(smtp: Server) -> None:
    count = BATCH + 2
    assert mail.send_mass_mail([(f"{n}", "x", None, ["ada@example.com"]) for n in range(count)]) == count
    assert BackgroundJob.objects.count() == count
    good = [a_message() for _ in range(BATCH)]
    with pytest.raises(InvalidArguments):
        _connection().send_messages([*good, a_message(body="\x00")])
    assert BackgroundJob.objects.count() == count


def _connection() -> Any:
    return mail.mailers.default if hasattr(django.conf.settings, "MAILERS") else mail.get_connection()


def test_nobody_to_send_to_is_nothing_to_enqueue(smtp: Server) -> None:
    assert a_message(to=[]).send() == 0
    assert _connection().send_messages([]) == 0
    assert _connection().send_messages([a_message(to=[""]), a_message(bcc=["b@example.com"])]) == 1
    assert BackgroundJob.objects.count() == 1


def test_the_queue_is_that_of_the_settings(smtp: Server, settings: Any) -> None:
    settings.PGJOBS = {"EMAIL_QUEUE": "emails"}
    a_message().send()
    assert [job.queue_name for job in BackgroundJob.objects.all()] == ["emails"]
    assert drain(queue="emails").completed == 1


def test_a_message_exists_if_and_only_if_its_transaction_commits(smtp: Server) -> None:
    with session() as other:

        def count() -> int:
            ((number,),) = other.execute("SELECT count(*) FROM background_jobs").fetchall()
            return int(number)

        with transaction.atomic():
            a_message().send()
            assert count() == 0
            transaction.set_rollback(True)
        assert count() == 0
        with transaction.atomic():
            a_message().send()
        assert count() == 1


# ── What a mail server may say ────────────────────────────────────────────────────────────────────────────


def drained(smtp: Server, **answers: list[str]) -> Drained:
    """What becomes of a message to two recipients when the server answers so."""
    smtp.answers = {command: list(said) for command, said in answers.items()}
    a_message(to=["ada@example.com", "bob@example.com"]).send()
    return drain()


@pytest.mark.parametrize(
    "answers",
    [
        {"RCPT": ["550 No such user", "553 Not here"]},
        {"MAIL": ["550 Who are you"]},
        {"DATA": ["554 Spam"]},
        {"DATA": ["552 Too large"]},
    ],
    ids=["recipients", "sender", "content", "size"],
)
def test_what_is_refused_for_good_is_a_dead_letter_at_once(smtp: Server, answers: Any) -> None:
    ran = drained(smtp, **answers)
    assert ran.count(Event.BURY) == len(ran) == 1
    assert "GiveUp: The mail server refuses the message: " in ran.errors[0]
    assert smtp.envelopes == []


@pytest.mark.parametrize(
    "answers",
    [
        {"RCPT": ["450 Greylisted", "450 Greylisted"]},
        {"RCPT": ["550 No such user", "451 Try again later"]},
        {"MAIL": ["451 Busy"]},
        {"MAIL": ["530 Authentication required"]},
        {"DATA": ["452 Disk full"]},
        {"DATA": ["421 Going down"]},
    ],
    ids=["recipients", "one of them", "sender", "password", "disk", "going down"],
)
def test_what_may_pass_is_tried_again_with_the_same_id(smtp: Server, answers: Any) -> None:
    ran = drained(smtp, **answers)
    assert ran.count(Event.FAIL) == len(ran) == 1
    assert smtp.envelopes == []
    BackgroundJob.objects.update(run_at=datetime(2026, 1, 1, tzinfo=UTC))
    headers = dict(BackgroundJob.objects.get().payload["args"][0]["headers"])
    assert drain().completed == 1
    (envelope,) = smtp.envelopes
    assert envelope.rcpt_tos == ["ada@example.com", "bob@example.com"]
    (message,) = smtp.messages
    assert (message["Message-ID"], message["Date"]) == (headers["Message-ID"], headers["Date"])


def test_a_server_that_is_away_is_tried_again(smtp: Server) -> None:
    with override_settings(**_away()):
        a_message().send()
        ran = drain()
    assert ran.count(Event.FAIL) == 1
    assert "ConnectionRefusedError" in ran.errors[0]
    wait = BackgroundJob.objects.get().run_at - datetime.now(UTC)
    assert timedelta(seconds=10) < wait < timedelta(seconds=30)


def _away(port: int = 1) -> dict[str, Any]:
    given = django.conf.settings
    if hasattr(given, "MAILERS"):
        smtp = {"BACKEND": SMTP_BACKEND, "OPTIONS": {"host": "127.0.0.1", "port": port}}
        return {"MAILERS": given.MAILERS | {"smtp": smtp}}
    return {"EMAIL_PORT": port}


def test_a_server_that_says_nothing_is_not_waited_for(smtp: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("django_pgjobs.mail.SILENCE", 0.1)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with override_settings(**_away(silent.getsockname()[1])):
            a_message().send()
            ran = drain()
    assert ran.count(Event.FAIL) == 1
    assert "TimeoutError" in ran.errors[0]


def test_an_address_that_is_none_is_a_dead_letter_at_once(smtp: Server) -> None:
    a_message(to=["ada@example.com, bob@example.com"]).send()
    ran = drain()
    assert ran.count(Event.BURY) == len(ran) == 1
    assert "GiveUp: The message cannot be sent: Invalid address" in ran.errors[0]


# ── The backend that sends ────────────────────────────────────────────────────────────────────────────────


class Picky(mail.backends.base.BaseEmailBackend):  # type: ignore[name-defined]
    """Does with each message as its attributes say."""

    seen: list[Any] = []

    def send_messages(self, messages: Any) -> Any:
        (message,) = messages
        self.seen.append(message)
        return getattr(message, "returns", None)


@pytest.fixture
def picky(settings: Any) -> type[Picky]:
    settings.EMAIL_BACKEND = OWN
    settings.PGJOBS = {"EMAIL_BACKEND": "tests.test_mail.Picky"}
    Picky.seen = []
    return Picky


def test_any_backend_can_send_and_gets_what_it_knows_of(picky: type[Picky]) -> None:
    message = a_message()
    message.tags = ["receipt"]  # type: ignore[attr-defined]
    message.metadata = {"order": 17}  # type: ignore[attr-defined]
    message.send()
    assert drain().completed == 1
    (seen,) = picky.seen
    assert (type(seen), seen.tags, seen.metadata) == (EmailMessage, ["receipt"], {"order": 17})


def test_a_backend_that_has_sent_nothing_is_tried_again(picky: type[Picky]) -> None:
    message = a_message()
    message.returns = 0  # type: ignore[attr-defined]
    message.send()
    ran = drain()
    assert ran.count(Event.FAIL) == 1
    assert "Retry: The e-mail backend reports that it has sent nothing." in ran.errors[0]


class Itself(EmailBackend):
    pass


def test_a_backend_that_would_enqueue_again_is_an_error_and_no_loop(picky: Any, settings: Any) -> None:
    settings.PGJOBS = {"EMAIL_BACKEND": "tests.test_mail.Itself"}
    a_message().send()
    ran = drain()
    assert (len(ran), ran.failed) == (1, 1)
    assert "tests.test_mail.Itself would enqueue the message again." in ran.errors[0]
    settings.PGJOBS = {"EMAIL_BACKEND": OWN}
    with pytest.raises(ImproperlyConfigured, match="EMAIL_BACKEND would enqueue messages again"):
        a_message().send()


@pytest.mark.skipif(django.VERSION < (6, 1), reason="MAILERS are new in Django 6.1.")
def test_mailers_that_cannot_send(controller: tuple[Server, Controller]) -> None:
    own: dict[str, Any] = {"BACKEND": OWN, "OPTIONS": {"mailer": "default"}}
    with override_settings(MAILERS={"default": own}):
        a_message().send()
        assert "would enqueue the message again" in drain().errors[0]
    with (
        override_settings(MAILERS={"default": {"BACKEND": OWN}}),
        pytest.raises(ImproperlyConfigured, match=r"MAILERS\['default'\]: OPTIONS must have 'mailer'"),
    ):
        a_message().send()


@pytest.mark.skipif(django.VERSION < (6, 1), reason="MAILERS are new in Django 6.1.")
def test_messages_that_are_older_than_mailers_are_sent(controller: tuple[Server, Controller]) -> None:
    server, where = controller
    server.__init__()  # type: ignore[misc]
    with override_settings(EMAIL_BACKEND=OWN):
        a_message().send()
    smtp = {"OPTIONS": {"host": where.hostname, "port": where.port}}
    own = {"BACKEND": OWN, "OPTIONS": {"mailer": "smtp"}}
    with override_settings(MAILERS={"default": own, "smtp": smtp}):
        assert drain().completed == 1
    assert len(server.envelopes) == 1


def test_every_process_of_the_project_can_send(child_environment: dict[str, str]) -> None:
    code = "import django; django.setup(); from django_pgjobs import jobs; print(sorted(jobs.registry))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )
    assert "'django_pgjobs.mail.send'" in done.stdout


# ── What cannot be stored ─────────────────────────────────────────────────────────────────────────────────


class OwnBuild(EmailMessage):
    def message(self, **kwargs: Any) -> Any:
        return super().message(**kwargs)


class Decorated(EmailMultiAlternatives):
    content_subtype = "html"

    def send(self, *args: Any, **kwargs: Any) -> int:
        return super().send(*args, **kwargs)


def with_attribute(value: Any) -> EmailMessage:
    message = a_message()
    message.extra = value  # type: ignore[attr-defined]
    return message


def with_attachment(*attachment: Any) -> EmailMessage:
    message = a_message()
    message.attachments.append(attachment)
    return message


@pytest.mark.parametrize(
    ("make", "complaint"),
    [
        (lambda: OwnBuild("Hi", to=["a@example.com"]), "its class OwnBuild has a message() of its own"),
        (lambda: a_message(body="\x00"), "args[0]['body']: the string has a NUL character"),
        (lambda: a_message(body=b"\xff"), "args[0]['body']: the string has a lone surrogate"),
        (lambda: with_attribute({1, 2}), "args[0]['attributes']['extra']: set is not JSON"),
        (lambda: with_attachment("f", object(), "a/b"), "it has content of type object; use str or bytes."),
        (lambda: with_attachment("f"), "its attachment ('f',) is not (filename, content, mimetype)."),
        (lambda: with_attachment("f", b"x" * 900_000, "a/b"), "The arguments take more than 1,048,576 bytes"),
    ],
    ids=["class", "NUL", "bytes", "attribute", "content", "attachment", "size"],
)
def test_what_cannot_be_stored_is_refused_where_it_was_made(picky: Any, make: Any, complaint: str) -> None:
    with transaction.atomic():
        with pytest.raises(InvalidArguments) as refused:
            make().send()
        assert str(refused.value).startswith("The message 'Hi' cannot be a job: ")
        assert complaint in str(refused.value)
        assert make().send(fail_silently=True) == 0
        assert BackgroundJob.objects.count() == 0  # and the transaction is usable


def test_an_object_that_is_no_message_is_refused() -> None:
    class Duck:
        subject = "Quack"

    with pytest.raises(InvalidArguments, match="it is a Duck, not an EmailMessage of Django"):
        as_json(Duck())  # type: ignore[arg-type]


def test_a_subclass_that_builds_as_django_does_is_stored_as_its_base() -> None:
    written = as_json(Decorated("Hi", "<p>", to=["a@example.com"]))
    restored = from_json(written)
    assert type(restored) is EmailMultiAlternatives
    assert restored.content_subtype == "html"


def test_headers_are_texts_in_their_order() -> None:
    headers = {"X-Z": 7, "Date": datetime(2026, 1, 2, tzinfo=UTC), "X-A": ("a@example.com", "b@example.com")}
    written = dict(as_json(a_message(headers=headers))["headers"])
    assert written.pop("Message-ID").startswith("<")
    assert list(written.items()) == [
        ("X-Z", "7"),
        ("Date", "Fri, 02 Jan 2026 00:00:00 +0000"),
        ("X-A", "a@example.com, b@example.com"),
    ]


def test_headers_cannot_be_injected(picky: Any) -> None:
    for message in (a_message(subject="a\nBcc: x@example.com"), a_message(headers={"X": "a\r\nb"})):
        with pytest.raises(ValueError, match=r"(?i)newline|linefeed|header"):
            message.send()
    assert BackgroundJob.objects.count() == 0


def test_credentials_are_not_kept_in_the_queue(picky: Any) -> None:
    with pytest.raises(ImproperlyConfigured, match="keeps no credentials"):
        mail.send_mail("Hi", "x", None, ["a@example.com"], auth_user="u", auth_password="p")


def test_silence_in_a_broken_transaction_and_a_usable_one_after_an_error(
    picky: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with transaction.atomic():
        with connection.cursor() as cursor:
            cursor.execute("ALTER TABLE background_jobs RENAME TO away")
        assert a_message().send(fail_silently=True) == 0
        with connection.cursor() as cursor:
            cursor.execute("SELECT 1")
        transaction.set_rollback(True)
        assert a_message().send(fail_silently=True) == 0


@pytest.mark.parametrize(
    "payload",
    [
        {"args": [{}]},
        {"args": ["text"]},
        {"args": [{"subject": "x", "body": 1, "from_email": 2, "headers": 3}]},
    ],
    ids=["empty", "text", "wrong types"],
)
def test_what_somebody_else_has_written_is_a_dead_letter(picky: Any, payload: Any) -> None:
    job = make_job(job_name="django_pgjobs.mail.send", payload=payload)
    drain()
    assert job.refresh().status == "failed"
    assert str(job.last_error).startswith("GiveUp: The stored message cannot be read: ")


def test_a_message_is_the_same_after_storing(smtp: Server) -> None:
    """What building it twice makes, apart from boundaries."""
    message = rich_message()
    written = as_json(message)
    assert as_json(from_json(written)) == written
    assert isinstance(from_json(written).message(), Message)
    assert message.extra_headers.keys() == {"X-Number", "X-Lazy", "List-Unsubscribe"}


def test_refusals_are_told_apart() -> None:
    from django_pgjobs.mail import _is_final

    refused = smtplib.SMTPRecipientsRefused
    assert _is_final(refused({"a": (550, b"no"), "b": (551, b"no")}))
    assert not _is_final(refused({"a": (550, b"no"), "b": (450, b"later")}))
    assert not _is_final(smtplib.SMTPAuthenticationError(535, b"no"))
    assert not _is_final(smtplib.SMTPConnectError(554, b"no"))
    assert not _is_final(smtplib.SMTPServerDisconnected("gone"))
