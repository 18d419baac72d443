"""What people do not get to see of a job: the values whose names `PGJOBS["REDACT"]` has, wherever they occur,
and those that the job function's own `redact` returns.

The row in the table stays as it is, since workers need it. Pages, logs and exports ask here before they show
any of it. What cannot be searched for secrets, because it is too large or cannot be read, is not shown.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator, Sequence
from fnmatch import translate
from functools import cache
from itertools import chain, repeat
from typing import Any
from urllib.parse import quote

from . import jobs
from .conf import config, folded
from .payload import clean_text, decode_arguments
from .store import in_one_line

logger = logging.getLogger(__name__)

HIDDEN = "[hidden]"
MOST_READ = 2_000_000  # characters of a payload that are searched for secrets
SHORTEST = 4  # characters of a value that is looked for in texts; shorter ones are everywhere
MOST_SECRETS = 200  # values of a job that are looked for in its texts
MOST_WORK = 1_000_000  # comparisons of a secret with a text, for one job
MOST_PARTS = 20_000  # comparisons of a secret with the end of a part of a text
PART = 8  # characters by which a part of a secret is found where a text was cut


class Redacted:
    """A job as it may be shown. Made of its name and its payload, a JSON text; None where that was not read.

    Without the payload it is not known what is secret, so no text about the job is shown at all.
    """

    def __init__(self, job_name: str, payload: str | None) -> None:
        self._pattern = _pattern(config().REDACT)
        function = jobs.find(job_name)
        self._own = None if function is None else function.redact
        self._own_values: set[str] = set()  # that it has returned
        self._verdicts: dict[str, bool] = {}  # by name
        self.hidden: set[str] = set()  # values
        self._secrets: list[str] = []  # as they may stand in a text, the longest first
        self._work = MOST_WORK
        self.stored = None if payload is None or len(payload) > MOST_READ else _read(payload)
        self._is_blind = self.stored is None
        if self._own is not None and payload is not None and not self._is_blind:
            self._ask(self._own, job_name, payload)
        self.payload = self.value(self.stored, job_name)

    @property
    def hides_nothing(self) -> bool:
        """Whether there is nothing to be hidden of such a job, whatever it has."""
        return self._pattern is None and self._own is None

    def _ask(self, own: jobs.Redact, job_name: str, payload: str) -> None:
        """Have the job function's own `redact` say what is secret. Where it cannot, everything is."""
        try:
            args, kwargs = decode_arguments(payload)
            told = own(*args, **kwargs)
            values = told if isinstance(told, str | dict) else list(told or ())
            self._own_values.update(filter(None, _leaves(values)))
        except Exception as error:  # its text may have a secret
            text = "The redact= of the job %s raised %s, so nothing of the arguments is shown."
            logger.warning(text, in_one_line(job_name), type(error).__name__)
            self._is_blind = True
        self.hidden |= self._own_values

    def value(self, value: Any, job_name: str | None = None) -> Any:
        """JSON that belongs to the job, such as its result, without secrets.

        With `job_name` it is a call, whose positional arguments have the names of the function's parameters.
        """
        if self.hides_nothing:
            return value
        if self._is_blind and (value is None or job_name is not None):
            return HIDDEN
        try:
            shown = self._by_name(value) if job_name is None else self._call(job_name, value)
            self._learn()
            return self._in_texts(shown)
        except RecursionError:
            self._is_blind = True
            return HIDDEN

    def text(self, text: str, *, is_cut: bool = False) -> str:
        """A text about the job, such as a traceback, without secrets; with `is_cut`, the beginning of one."""
        if self.hides_nothing or not text:
            return text
        self._work -= (1 + len(self._secrets)) * (1 + len(text) // 1000)
        if self._is_blind or self._work < 0:
            return HIDDEN
        if self._pattern is not None:
            text = _USER_INFO.sub(rf"\1{HIDDEN}@", text)
            text = _NAMED.sub(self._hide_if_named, text)
        for secret in self._secrets:
            text = text.replace(secret, HIDDEN)
        return _without_parts(text, self._secrets, is_cut)

    def summary(self, error: str) -> str:
        """The first line of an error. Where it must not be shown, the class of the exception still is."""
        shown = self.text(error, is_cut=True)
        class_, colon, _ = error.partition(": ")
        return f"{class_}: {shown}" if shown == HIDDEN and colon and class_.isidentifier() else shown

    def restored(self, edited: Any, part: str) -> Any:
        """The `args` or `kwargs` that somebody was shown and has edited, with what was hidden in them."""
        if self.stored is None or not isinstance(self.payload, dict) or part not in self.payload:
            return edited
        return _restored(edited, self.payload[part], self.stored[part])

    # ── By name ───────────────────────────────────────────────────────────────────────────────────────────

    def _is_secret(self, name: str) -> bool:
        if self._pattern is None:
            return False
        if name not in self._verdicts:
            self._verdicts[name] = self._pattern.match(folded(name)) is not None
        return self._verdicts[name]

    def _call(self, job_name: str, payload: Any) -> Any:
        if not isinstance(payload, dict):
            return self._hide(payload)  # it is no call, so there are no names
        if not isinstance(payload.get("args"), list):
            return self._by_name(payload)
        args = []
        for value, name in zip(payload["args"], _parameters(job_name), strict=False):
            hides = name is None or self._is_secret(name)
            args.append(self._hide(value) if hides else self._by_name(value))
        return {key: args if key == "args" else self._by_name(value) for key, value in payload.items()}

    def _by_name(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: self._hide(each) if self._is_secret(key) else self._by_name(each)
                for key, each in value.items()
            }
        if isinstance(value, list):
            return [self._by_name(each) for each in value]
        return value

    def _hide(self, value: Any) -> Any:
        """What is shown instead of a value. That something is absent, or true, is no secret."""
        if value is None or isinstance(value, bool):
            return value
        self.hidden.update(_leaves(value))
        return HIDDEN

    def _hide_if_named(self, found: re.Match[str]) -> str:
        return found[1] + found[2] + (HIDDEN if self._is_secret(found[1]) else found[3])

    # ── In texts ──────────────────────────────────────────────────────────────────────────────────────────

    def _learn(self) -> None:
        if len(self.hidden) > MOST_SECRETS:
            self._is_blind = True
            return
        forms = set(chain.from_iterable(map(_forms, self.hidden)))
        self._secrets = sorted(forms, key=len, reverse=True)

    def _in_texts(self, value: Any) -> Any:
        if isinstance(value, str | int | float) and str(value) in self._own_values:
            return HIDDEN
        if isinstance(value, str):
            return value if value == HIDDEN else self.text(value)
        if isinstance(value, dict):
            return {key: self._in_texts(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self._in_texts(each) for each in value]
        return value


def _restored(edited: Any, shown: Any, stored: Any) -> Any:
    if edited == shown:
        return stored
    if isinstance(edited, dict) and isinstance(shown, dict):
        return {
            key: _restored(value, shown[key], stored[key]) if key in shown else value
            for key, value in edited.items()
        }
    if isinstance(edited, list) and isinstance(shown, list):
        known = [_restored(*three) for three in zip(edited, shown, stored, strict=False)]
        return known + edited[len(known) :]
    return edited


# A password in an address, and a value behind its name: `token=abc`, `"token": "abc"`, `Token: Bearer abc`.
_USER_INFO = re.compile(r"(\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@]{0,200}:)[^\s/@]+@", re.I)
_NAMED = re.compile(
    r"""(?<![\w-])([\w-]{1,64})(\\?["']?[ ]?(?:=(?!=)|:(?!//))[ ]?)"""
    r"""((?:(?:Bearer|Basic)[ ])?(?:\\"[^"]*+"?|"(?:[^"\\]|\\.)*+"?|'(?:[^'\\]|\\.)*+'?|[^\s,;&"')\]}]++))""",
    re.I,
)


@cache
def _pattern(names: tuple[str, ...]) -> re.Pattern[str] | None:
    """What matches a name that is folded, if anything is to be hidden."""
    if not names:
        return None
    return re.compile("|".join(translate(folded(name).replace("[", "[[]")) for name in names))


def _parameters(job_name: str) -> Iterator[str | None]:
    """The names of positional arguments; None for those of which nobody knows it."""
    function = jobs.find(job_name)
    for parameter in function.signature.parameters.values() if function else ():
        if parameter.kind is parameter.VAR_POSITIONAL:
            yield from repeat(parameter.name)
        if parameter.kind in (parameter.POSITIONAL_ONLY, parameter.POSITIONAL_OR_KEYWORD):
            yield parameter.name
    yield from repeat(None)


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            yield from _leaves(each)
    elif value is not None and not isinstance(value, bool):
        yield str(value)


def _forms(secret: str) -> Iterator[str]:
    """How a value may stand in a text: as it is, quoted, in an address, its lines by themselves."""
    forms = {secret, clean_text(secret, 10 * len(secret)), repr(secret)[1:-1], quote(secret)}
    forms.update(json.dumps(secret, ensure_ascii=ascii)[1:-1] for ascii in (True, False))
    forms.update(line for line in secret.splitlines() if len(line) >= PART)
    return (form for form in forms if len(form.strip()) >= SHORTEST)


_CUT = re.compile(r"( … \[\d+ characters cut\] … | …[\[\]\w …]{0,40}\Z)")  # the second is cut itself


def _without_parts(text: str, secrets: Sequence[str], is_cut: bool) -> str:
    """A text without beginnings and ends of secrets where `payload.clean_text` has cut it, or at its end."""
    parts = _CUT.split(text)
    if len(parts) * len(secrets) > MOST_PARTS:
        return HIDDEN
    for index in range(0, len(parts), 2):
        for secret in secrets:
            if index:
                length = _common(secret[::-1], parts[index][: len(secret)][::-1])
                parts[index] = (HIDDEN if length else "") + parts[index][length:]
            if (is_cut or index + 1 < len(parts)) and (length := _common(secret, parts[index])):
                parts[index] = parts[index][:-length] + HIDDEN
    return "".join(parts)


def _common(secret: str, text: str) -> int:
    """The length of the longest beginning of a secret with which a text ends; 0 for very short ones."""
    last = text[-PART:]
    at = secret.rfind(last) if len(last) == PART else -1
    while at >= 0:
        if text.endswith(secret[: at + PART]):
            return at + PART
        at = secret.rfind(last, 0, at + PART - 1)
    lengths = range(min(PART, len(secret), len(text)), SHORTEST - 1, -1)
    return next((length for length in lengths if text.endswith(secret[:length])), 0)


def _read(payload: str) -> Any:
    """None for what cannot be read."""
    try:
        return json.loads(payload)
    except (ValueError, RecursionError):
        return None
