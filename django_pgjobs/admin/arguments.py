"""Retrying a job with other arguments: edited as JSON, checked as at enqueue, shown beside the old ones."""

from __future__ import annotations

import difflib
import json
from datetime import datetime
from typing import Any, NamedTuple

from django import forms

from .. import jobs, store
from ..conf import config
from ..models import BackgroundJob
from ..operations import REASON_LIMIT
from ..payload import decode_arguments
from ..redaction import HIDDEN, Redacted

LARGEST = 50_000  # characters of JSON that are edited


def parsed(form: forms.BaseForm, field: str, text: str, default: Any) -> Any:
    """What a JSON text in a form says; `default`, whose type it must have, where it is empty.

    Where it cannot be read, the form gets an error.
    """
    if not text.strip():
        return default
    kind = type(default)
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        form.add_error(field, f"This is not JSON: {error}.")
        return default
    if not isinstance(value, kind):
        what = "array, such as [1, 2]" if kind is list else 'object, such as {"days": 7}'
        form.add_error(field, f"This must be a JSON {what}.")
    return value


def restored(form: forms.BaseForm, field: str, edited: Any, redacted: Redacted | None) -> Any:
    """The arguments of a form, those that were hidden and left so included.

    The form gets an error where something hidden was put elsewhere.
    """
    if redacted is not None:
        edited = redacted.restored(edited, field)
    if HIDDEN in json.dumps(edited):
        form.add_error(field, f"{HIDDEN} stands for a secret of another place or job. Write the value.")
    return edited


class EditForm(forms.Form):
    args = forms.CharField(
        label="Arguments",
        required=False,
        widget=forms.Textarea({"cols": 60}),
        help_text='A JSON array: ["north", 7]',
    )
    kwargs = forms.CharField(
        label="Keyword arguments",
        required=False,
        widget=forms.Textarea({"cols": 60}),
        help_text='A JSON object: {"days": 7}',
    )
    reason = forms.CharField(
        max_length=REASON_LIMIT // 4,
        widget=forms.TextInput({"size": 60}),
        help_text="Goes into the history of the job.",
    )
    seen_at = forms.CharField(widget=forms.HiddenInput)  # the updated_at of the job that was looked at

    def __init__(self, redacted: Redacted, *args: Any, **kwargs: Any) -> None:
        self.redacted = redacted  # the arguments that are edited
        super().__init__(*args, **kwargs)
        for name in ("args", "kwargs"):
            lines = str(self[name].value() or "").count("\n") + 1
            self.fields[name].widget.attrs["rows"] = min(max(lines, 4), 20)

    def clean(self) -> dict[str, Any]:
        cleaned: dict[str, Any] = super().clean() or {}
        for name, default in (("args", []), ("kwargs", {})):
            edited = parsed(self, name, cleaned.get(name, ""), default)
            cleaned[name] = restored(self, name, edited, self.redacted)
        return cleaned

    def clean_seen_at(self) -> datetime:
        try:
            return datetime.fromisoformat(self.cleaned_data["seen_at"])
        except ValueError:
            raise forms.ValidationError("This is no time.") from None


class Uneditable(Exception):
    """The arguments of a job cannot be edited; the text says why, in a sentence."""


def arguments_of(job: BackgroundJob) -> Redacted:
    """The arguments of a job, and which of them are hidden. Raises Uneditable."""
    text = store.texts(job.pk, config().DATABASE, most=LARGEST, most_errors=0, pretty=0)["payload"]
    if text.cut:
        raise Uneditable("The arguments are too large to be edited here.")
    if jobs.find(job.job_name) is None:
        raise Uneditable("No job function of this name is known to this site, so nobody can check them.")
    try:
        decode_arguments(text.shown)
    except ValueError as error:
        raise Uneditable(str(error)) from None
    redacted = Redacted(job.job_name, text.shown)
    if not isinstance(redacted.payload, dict):
        raise Uneditable("Nobody can tell which of the arguments are secret, so they are not shown.")
    return redacted


def as_texts(redacted: Redacted) -> dict[str, str]:
    """Arguments as they are edited."""
    return {
        name: json.dumps(redacted.payload.get(name, default), indent=2, ensure_ascii=False)
        for name, default in (("args", []), ("kwargs", {}))
    }


class Line(NamedTuple):
    """A line of a difference: kept (" "), taken out ("-") or put in ("+"); "@" stands for lines left out."""

    sign: str
    text: str


def difference(before: Redacted, after: Redacted) -> list[Line]:
    """What differs between two versions of the arguments of a job; nothing where they are equal."""
    nothing: dict[str, Any] = {"args": [], "kwargs": {}}
    old, new = (
        json.dumps(
            nothing | each.payload if isinstance(each.payload, dict) else each.payload,
            indent=2,
            ensure_ascii=False,
        ).splitlines()
        for each in (before, after)
    )
    _, _, *lines = [*difflib.unified_diff(old, new, lineterm="")] or ["", ""]
    if lines and lines[0].startswith("@@ -1,"):
        del lines[0]  # nothing is left out before the first line
    shown = [Line(line[0], line[1:] if line[0] != "@" else "…") for line in lines]
    if before.hidden != after.hidden:
        shown += [
            Line("-", "hidden values, as they were"),
            Line("+", "hidden values, as they are written now"),
        ]
    return shown
