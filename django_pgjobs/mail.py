"""An e-mail backend whose messages are jobs: they exist if the transaction commits, and are tried again.

`EmailBackend` writes each message down as JSON and enqueues it. `send_email`, the job, makes it a message
again and gives it to the backend that sends: where there are MAILERS, the one that OPTIONS name, else
`PGJOBS["EMAIL_BACKEND"]`.
"""

from __future__ import annotations

import smtplib
from base64 import b64decode, b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from email.message import Message, MIMEPart
from email.mime.base import MIMEBase
from email.parser import BytesParser
from email.policy import compat32, default
from email.utils import format_datetime, make_msgid
from typing import Any

import django
from django.conf import settings
from django.core import mail
from django.core.exceptions import ImproperlyConfigured
from django.core.mail.backends.base import BaseEmailBackend
from django.core.mail.backends.smtp import EmailBackend as SMTPBackend
from django.db import Error, transaction
from django.utils import timezone
from django.utils.encoding import force_str
from django.utils.functional import Promise
from django.utils.module_loading import import_string

from .conf import config
from .exceptions import GiveUp, InvalidArguments, Retry
from .jobs import job
from .payload import encode_arguments

__all__ = ["EmailBackend", "send_email"]

BATCH = 100  # messages that are enqueued with one statement
SILENCE = 60.0  # seconds; for how long a mail server may be silent where the project does not say it


class EmailBackend(BaseEmailBackend):
    """Enqueues messages, each as a job, in the current transaction of the queue's database.

    `mailer` is for MAILERS: the alias of the mailer that sends. With `fail_silently`, a message that cannot
    be enqueued is left out, and the caller's transaction stays usable.
    """

    def __init__(
        self,
        mailer: str | None = None,
        *,
        fail_silently: bool = False,
        username: str | None = None,
        password: str | None = None,
        alias: str | None = None,
        **kwargs: Any,
    ) -> None:
        if alias is not None:
            kwargs["alias"] = alias
        super().__init__(**kwargs)
        self.fail_silently = fail_silently
        self.mailer = mailer
        if username is not None or password is not None:
            raise ImproperlyConfigured(
                "The e-mail backend of django_pgjobs sends nothing itself, and keeps no credentials in the"
                " queue. Give them to the backend that sends."
            )
        if alias is not None and mailer is None:
            raise ImproperlyConfigured(
                f"MAILERS[{alias!r}]: OPTIONS must have 'mailer', the alias of the mailer that sends."
            )

    def send_messages(self, email_messages: Sequence[mail.EmailMessage]) -> int:
        """Enqueue messages, all of them or none. Returns how many have recipients, and so are sent.

        Raises InvalidArguments for a message that cannot be stored, and what building it raises, such as
        ValueError for a header with a newline. With `fail_silently`, what can be enqueued is.
        """
        messages = [message for message in email_messages or () if message.recipients()]
        if not self.fail_silently:
            self._enqueue(messages)
            return len(messages)
        enqueued = 0
        for message in messages:
            try:
                self._enqueue([message])
            except (InvalidArguments, Error):
                continue
            enqueued += 1
        return enqueued

    def _enqueue(self, messages: Sequence[mail.EmailMessage]) -> None:
        send = send_email.using(queue=config().EMAIL_QUEUE)
        calls: list[tuple[Sequence[Any], dict[str, Any]]] = [
            ((as_json(message), self.mailer), {}) for message in messages
        ]
        if len(calls) <= BATCH and not self.fail_silently:
            send.enqueue_many(calls)
            return
        with transaction.atomic(using=config().DATABASE):
            for start in range(0, len(calls), BATCH):
                send.enqueue_many(calls[start : start + BATCH])


# Half a day of attempts by the default backoff: mail servers ask to wait, and are down for a night.
@job(name="django_pgjobs.mail.send", max_attempts=20, timeout=300)
def send_email(message: dict[str, Any], mailer: str | None = None) -> None:
    """Send a message that `EmailBackend` has enqueued. Gives up when the mail server refuses it for good."""
    connection = _sender(mailer)
    try:
        restored = from_json(message)
    except Exception as error:
        raise GiveUp(f"The stored message cannot be read: {type(error).__name__}: {error}") from error
    try:
        sent = connection.send_messages([restored])
    except smtplib.SMTPException as error:
        if _is_final(error):
            raise GiveUp(f"The mail server refuses the message: {error}") from error
        raise
    except ValueError as error:
        if isinstance(connection, SMTPBackend):
            raise GiveUp(f"The message cannot be sent: {error}") from error
        raise
    if sent == 0:
        raise Retry(reason="The e-mail backend reports that it has sent nothing.")


def _sender(mailer: str | None) -> BaseEmailBackend:
    """The backend that sends. Jobs may be older than the settings, and know of no mailer yet."""
    connection: BaseEmailBackend
    if hasattr(settings, "MAILERS"):
        connection = mail.mailers[mailer or "default"]
        if isinstance(connection, EmailBackend):
            connection = mail.mailers[connection.mailer or ""]
    else:
        connection = import_string(config().EMAIL_BACKEND)()
    if isinstance(connection, EmailBackend):
        raise ImproperlyConfigured(
            f"{type(connection).__module__}.{type(connection).__qualname__} would enqueue the message again."
            " Name the backend that sends: in OPTIONS['mailer'] of MAILERS, or in PGJOBS['EMAIL_BACKEND']."
        )
    if isinstance(connection, SMTPBackend) and connection.timeout is None:
        connection.timeout = SILENCE  # else one that hangs would cost its executor
    return connection


# What a server says to us, and not to the message: who has the password right may try again.
_ABOUT_US = {530, 534, 535, 538}


def _is_final(error: smtplib.SMTPException) -> bool:
    """Whether a mail server has refused a message for good."""
    match error:
        case smtplib.SMTPRecipientsRefused():
            codes = [code for code, _ in error.recipients.values()]
        case smtplib.SMTPSenderRefused() | smtplib.SMTPDataError():
            codes = [error.smtp_code]
        case _:
            return False
    return all(500 <= code <= 599 and code not in _ABOUT_US for code in codes)


# ── Messages as JSON ──────────────────────────────────────────────────────────────────────────────────────

_ADDRESSES = ("to", "cc", "bcc", "reply_to")
_FORMS = ("content_subtype", "encoding", "mixed_subtype", "alternative_subtype")
_WRITTEN = {
    "subject", "body", "from_email", "extra_headers", "attachments", "alternatives", "connection",
    "_connection", *_ADDRESSES, *_FORMS,
}  # fmt: skip


def as_json(message: mail.EmailMessage) -> dict[str, Any]:
    """A message as JSON: what is empty is left out, lazy texts are in the current language.

    It gets the date and the Message-ID that each attempt will send. Raises InvalidArguments for what cannot
    be stored, and whatever building the message raises.
    """
    try:
        written = _written(message)
        encode_arguments([written], {}, config().MAX_PAYLOAD_BYTES)
    except InvalidArguments as error:
        raise InvalidArguments(
            f"The message {str(message.subject)!r:.100} cannot be a job: {error}"
        ) from None
    from_json(written).message()  # so that what is wrong with it is known here, where it was made
    return written


def _written(message: mail.EmailMessage) -> dict[str, Any]:
    base = _base(message)
    encoding = getattr(message, "encoding", None) or settings.DEFAULT_CHARSET
    written: dict[str, Any] = {
        "subject": str(message.subject),
        "body": force_str(message.body or "", encoding=str(encoding), errors="surrogateescape"),
        "from_email": str(message.from_email),
        "headers": list(map(list, _headers(message).items())),  # an object would lose their order
    }
    for name in _ADDRESSES:
        if addresses := getattr(message, name):
            written[name] = [str(address) for address in addresses]
    for name in _FORMS:
        if (value := getattr(message, name, None)) != getattr(base, name, None):
            written[name] = value
    if message.attachments:
        written["attachments"] = [_attachment(one) for one in message.attachments]
    if isinstance(message, mail.EmailMultiAlternatives):
        written["alternatives"] = [
            {"mimetype": mimetype, **_content(content)} for content, mimetype in message.alternatives
        ]
    if others := {name: value for name, value in vars(message).items() if name not in _WRITTEN}:
        written["attributes"] = others  # that the backend that sends may know
    return written


def from_json(written: dict[str, Any]) -> mail.EmailMessage:
    """The message that `as_json` was given. Raises anything if it was written by somebody else."""
    class_ = mail.EmailMultiAlternatives if "alternatives" in written else mail.EmailMessage
    message = class_(
        subject=written["subject"],
        body=written["body"],
        from_email=written["from_email"],
        headers=dict(written["headers"]),
        **{name: written.get(name) for name in _ADDRESSES},
    )
    for name, value in written.get("attributes", {}).items():
        setattr(message, name, value)
    for name in _FORMS:
        if name in written:
            setattr(message, name, written[name])
    message.attachments = [_attached(one) for one in written.get("attachments", ())]
    for one in written.get("alternatives", ()):
        message.attach_alternative(_bytes_or_text(one), one["mimetype"])  # type: ignore[attr-defined]
    return message


def _base(message: mail.EmailMessage) -> type[mail.EmailMessage]:
    """The class of Django's that a message is made of again. Raises InvalidArguments if it would differ."""
    for base in (mail.EmailMultiAlternatives, mail.EmailMessage):
        if isinstance(message, base):
            break
    else:
        raise InvalidArguments(f"it is a {type(message).__name__}, not an EmailMessage of Django.")
    classes = type(message).__mro__
    for class_ in classes[: classes.index(base)]:
        for name, value in vars(class_).items():
            builds = name in ("message", "recipients") or name.startswith("_")
            if builds and not name.startswith("__") and callable(value) and hasattr(base, name):
                raise InvalidArguments(
                    f"its class {class_.__name__} has a {name}() of its own, which a worker would not call."
                    " Use EmailMultiAlternatives, or send it through another backend."
                )
    return base


def _headers(message: mail.EmailMessage) -> dict[str, str]:
    headers = {str(name): _header(value) for name, value in message.extra_headers.items()}
    given = {name.lower() for name in headers}
    if "date" not in given:
        zone = timezone.get_current_timezone() if settings.EMAIL_USE_LOCALTIME else UTC
        headers["Date"] = format_datetime(datetime.now(zone))
    if "message-id" not in given:
        headers["Message-ID"] = make_msgid(domain=str(mail.DNS_NAME))
    return headers


def _header(value: Any) -> str:
    if isinstance(value, datetime):
        return format_datetime(value)
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _attachment(attachment: Any) -> dict[str, Any]:
    if isinstance(attachment, Message):
        return {"part": _base64(attachment.as_bytes())}
    if not isinstance(attachment, Iterable) or not 2 <= len(parts := tuple(attachment)) <= 3:
        raise InvalidArguments(f"its attachment {attachment!r:.100} is not (filename, content, mimetype).")
    filename, content, mimetype = (*parts, None)[:3]
    return {
        "filename": None if filename is None else str(filename),
        "mimetype": None if mimetype is None else str(mimetype),
        **_content(content),
    }


def _attached(written: dict[str, Any]) -> Any:
    if "part" not in written:
        return mail.EmailAttachment(written["filename"], _bytes_or_text(written), written["mimetype"])
    data = b64decode(written["part"])
    if django.VERSION >= (6, 0):
        return BytesParser(MIMEPart, policy=default).parsebytes(data)  # type: ignore[arg-type]
    return BytesParser(_Part, policy=compat32).parsebytes(data)


class _Part(MIMEBase):
    """What Django 5.2 takes for an attachment that is ready."""

    def __init__(self, policy: Any = compat32) -> None:
        Message.__init__(self, policy=policy)


def _content(content: Any) -> dict[str, str]:
    """Content as one entry that says what it is: `text` or `base64`."""
    match content:
        case str() | Promise():
            return {"text": str(content)}
        case bytes() | bytearray() | memoryview():
            return {"base64": _base64(content)}
        case mail.EmailMessage():
            return {"base64": _base64(content.message().as_bytes())}
        case Message():
            return {"base64": _base64(content.as_bytes())}
    raise InvalidArguments(f"it has content of type {type(content).__name__}; use str or bytes.")


def _bytes_or_text(written: dict[str, Any]) -> bytes | str:
    return b64decode(written["base64"]) if "base64" in written else str(written["text"])


def _base64(data: bytes | bytearray | memoryview) -> str:
    return b64encode(data).decode()
