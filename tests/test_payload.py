from __future__ import annotations

import dataclasses
import enum
import json
import math
import string
import sys
import uuid
from collections import OrderedDict, defaultdict, namedtuple
from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import User
from django.db import connection
from django.utils.functional import SimpleLazyObject
from django.utils.translation import gettext_lazy
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from django_pgjobs import InvalidArguments, payload
from django_pgjobs.payload import (
    MAX_DEPTH,
    clean_text,
    decode_arguments,
    encode_arguments,
    encode_result,
)

LIMIT = 1024 * 1024


def through_jsonb(text: str) -> str:
    """JSON text, as it comes back after jsonb has had it."""
    with connection.cursor() as cursor:
        cursor.execute("SELECT %s::jsonb::text", [text])
        return cursor.fetchone()[0]


def refusal(*args: object, limit: int = LIMIT, **kwargs: object) -> str:
    with pytest.raises(InvalidArguments) as caught:
        encode_arguments(args, kwargs, limit)
    return str(caught.value)


def kind(value: object) -> str:
    """What pytest shows of a value whose repr may raise."""
    return type(value).__name__


# ── There and back ────────────────────────────────────────────────────────────────────────────────────────


class Text(str):
    __slots__ = ()

    def __str__(self):
        return "another text"

    __repr__ = __str__


class Number(int):
    def __repr__(self):
        return "another number"

    __str__ = __repr__


class Fraction(float):
    def __repr__(self):
        return "another fraction"

    __str__ = __repr__


class Mapping(dict):
    pass


class Many(list):
    pass


class Colour(str, enum.Enum):  # noqa: UP042 - the older kind
    RED = "red"


class Flavour(enum.StrEnum):
    SOUR = "sour"


class Level(enum.IntEnum):
    HIGH = 3


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    ("value", "back"),
    [
        (None, None),
        (True, True),
        (False, False),
        (0, 0),
        (-(10**2000), -(10**2000)),
        (2**8191, 2**8191),
        (1.0, 1.0),
        (-0.0, 0.0),
        (5e-324, 5e-324),
        (0.1, 0.1),
        (1e15, 1e15),
        (1e16, 1e16),
        (1e22, 1e22),
        (1e308, 1e308),
        (1.7976931348623157e308, 1.7976931348623157e308),
        ("", ""),
        ("é\U0001f600\uffff\ufdd0\u2028", "é\U0001f600\uffff\ufdd0\u2028"),
        ('\x01\x7f\\"/\n', '\x01\x7f\\"/\n'),
        ("\\u0000", "\\u0000"),
        ([], []),
        ({}, {}),
        ((1, (2, ())), [1, [2, []]]),
        (Point(1, 2), [1, 2]),
        ({"": 1, "a'b\"c": {"é": None}}, {"": 1, "a'b\"c": {"é": None}}),
        (OrderedDict(b=1, a=2), {"a": 2, "b": 1}),
        (defaultdict(int, a=1), {"a": 1}),
        (Colour.RED, "red"),
        (Flavour.SOUR, "sour"),
        (Level.HIGH, 3),
        ({Colour.RED: Level.HIGH}, {"red": 3}),
        (Text("text"), "text"),
        ({Text("text"): 1}, {"text": 1}),
        (Number(5), 5),
        (Fraction(2.5), 2.5),
        (Fraction(1e22), 1e22),
        (Mapping(a=[1]), {"a": [1]}),
        (Mapping(), {}),
        (Many([1, {"a": 2}]), [1, {"a": 2}]),
        (Many(), []),
    ],
    ids=kind,
)
def test_json_comes_back_equal_and_of_the_same_type(db, value, back):
    args, kwargs = decode_arguments(through_jsonb(encode_arguments([value], {"name": value}, LIMIT)))

    assert args == [back]
    assert kwargs == {"name": back}
    assert type(args[0]) is type(back)


def test_an_int_stays_an_int_and_a_float_a_float(db):
    numbers = [1, 1.0, 10**22, 1e22]

    (back,), _ = decode_arguments(through_jsonb(encode_arguments([numbers], {}, LIMIT)))

    assert [type(number) for number in back] == [int, float, int, float]


def test_the_deepest_value_comes_back(db):
    value = []
    for _ in range(MAX_DEPTH - 2):
        value = [value]

    (back,), _ = decode_arguments(through_jsonb(encode_arguments([value], {}, LIMIT)))

    assert back == value


def test_a_value_may_appear_in_several_places(db):
    shared = {"a": [1]}

    (back,), _ = decode_arguments(through_jsonb(encode_arguments([[shared, shared]], {}, LIMIT)))

    assert back == [shared, shared]


# ── Refused, with advice ──────────────────────────────────────────────────────────────────────────────────


@dataclasses.dataclass
class Order:
    id: int = 1


class Float32:
    """A number that is not a float, as those of numerical libraries."""

    def __float__(self):
        return 1.0


ISO = "pass an ISO string"
SUPPORTED = "pass strings, numbers, booleans, None, lists and dicts of these"


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (date(2026, 1, 2), f"date is not JSON; {ISO}."),
        (datetime(2026, 1, 2), f"datetime is not JSON; {ISO}."),
        (datetime(2026, 1, 2, tzinfo=UTC), f"datetime is not JSON; {ISO}."),
        (datetime.max, f"datetime is not JSON; {ISO}."),
        (time(3), f"time is not JSON; {ISO}."),
        (timedelta(1), "timedelta is not JSON; pass a number of seconds."),
        (Decimal("1.5"), "Decimal is not JSON; pass a string."),
        (Decimal("NaN"), "Decimal is not JSON; pass a string."),
        (uuid.UUID(int=1), "UUID is not JSON; pass a string."),
        (b"bytes", "bytes is not JSON; pass a base64 string."),
        (bytearray(b"bytes"), "bytearray is not JSON; pass a base64 string."),
        (memoryview(b"bytes"), "memoryview is not JSON; pass a base64 string."),
        ({1}, "set is not JSON; pass a sorted list."),
        (frozenset({1}), "frozenset is not JSON; pass a sorted list."),
        (enum.Enum("Shape", "ROUND").ROUND, "Shape is not JSON; pass its value."),
        (gettext_lazy("Hello"), "__proxy__ is not JSON; pass str(...) of the lazy text."),
        (SimpleLazyObject(lambda: "text"), f"SimpleLazyObject is not JSON; {SUPPORTED}."),
        (User(), "User is a model instance, not JSON; pass its primary key."),
        (User.objects.all(), "QuerySet is not JSON; pass a list of primary keys."),
        (Order(), f"Order is not JSON; {SUPPORTED}."),
        (Float32(), f"Float32 is not JSON; {SUPPORTED}."),
        (1j, f"complex is not JSON; {SUPPORTED}."),
        (range(3), f"range is not JSON; {SUPPORTED}."),
        ({}.keys(), f"dict_keys is not JSON; {SUPPORTED}."),
        (SimpleNamespace(), f"SimpleNamespace is not JSON; {SUPPORTED}."),
        (object, f"type is not JSON; {SUPPORTED}."),
        (print, f"builtin_function_or_method is not JSON; {SUPPORTED}."),
        (math.nan, "nan is not JSON; pass None or a string."),
        (math.inf, "inf is not JSON; pass None or a string."),
        (-math.inf, "-inf is not JSON; pass None or a string."),
        (Fraction("nan"), "nan is not JSON; pass None or a string."),
        (10**5000, "the integer has too many digits; pass a string."),
        (Number(10**5000), "the integer has too many digits; pass a string."),
        ("a\x00b", "the string has a NUL character, which Postgres cannot store; remove it."),
        (Text("a\x00b"), "the string has a NUL character, which Postgres cannot store; remove it."),
        ("a\ud800b", "the string has a lone surrogate, which is not text; remove it."),
        ({1: 2}, "the key 1 is int, but JSON has only string keys."),
        ({None: 2}, "the key None is NoneType, but JSON has only string keys."),
        ({True: 2}, "the key True is bool, but JSON has only string keys."),
        ({(1, 2): 2}, "the key (1, 2) is tuple, but JSON has only string keys."),
        ({10**5000: 2}, "the key <int that cannot be printed> is int, but JSON has only string keys."),
    ],
    ids=kind,
)  # fmt: skip
def test_what_is_not_json_is_refused_with_advice(value, reason):
    assert refusal(value) == f"args[0]: {reason}"
    assert refusal(items=[1, {"a": value}]) == f"kwargs['items'][1]['a']: {reason}"
    assert encode_result(value, LIMIT) == (None, f"The result could not be stored: result: {reason}")


def test_a_bad_key_is_named():
    assert (
        refusal({"a": {"b\x00": 1}})
        == "args[0]['a']['b\\x00']: the string has a NUL character, which Postgres cannot store; remove it."
    )


def test_the_path_names_the_argument_and_the_element():
    assert refusal(1, items=[0, 1, 2, datetime(2026, 1, 2)]) == (
        "kwargs['items'][3]: datetime is not JSON; pass an ISO string."
    )


def test_a_long_path_is_cut():
    assert refusal({"k" * 1000: {1}}) == ("args[0]['" + "k" * 191 + "…: set is not JSON; pass a sorted list.")


@pytest.mark.parametrize("depth", [MAX_DEPTH, 20_000])
def test_a_value_that_is_too_deep_is_refused(depth):
    value = []
    for _ in range(depth - 1):
        value = [value]

    assert refusal(value).endswith(": the value is nested more than 200 levels deep; flatten it.")


def test_a_value_that_contains_itself_is_refused():
    circle = {}
    circle["self"] = [circle]

    assert refusal(circle).endswith(": the value is nested more than 200 levels deep; flatten it.")


def test_a_small_value_that_would_be_a_huge_text_is_refused():
    value = ["x"]
    for _ in range(100):
        value = [value, value]

    assert refusal(value) == (
        "The arguments take more than 1,048,576 bytes as JSON, which is what PGJOBS['MAX_PAYLOAD_BYTES']"
        " allows. Store the data elsewhere and pass a reference to it."
    )


@pytest.mark.parametrize("item", ["x" * LIMIT, "x" * 1000, 2**8191, {"k" * LIMIT: 1}], ids=kind)
def test_a_refusal_needs_no_more_memory_than_the_limit(item):
    assert refusal([item] * LIMIT).startswith("The arguments take more than 1,048,576 bytes as JSON")


def test_arguments_may_be_as_large_as_the_limit_and_no_larger():
    text = encode_arguments(["x" * 100], {}, 1000)

    assert encode_arguments(["x" * 100], {}, len(text)) == text
    assert refusal("x" * 100, limit=len(text) - 1) == (
        f"The arguments take more than {len(text) - 1} bytes as JSON, which is what"
        " PGJOBS['MAX_PAYLOAD_BYTES'] allows. Store the data elsewhere and pass a reference to it."
    )


def test_the_limit_counts_bytes_and_not_characters():
    assert refusal("é" * 20, limit=100).startswith("The arguments take more than 100 bytes as JSON")


class Liar:
    __class__ = str


class HostileKey:
    def __repr__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (Liar(), f"args[0]: Liar is not JSON; {SUPPORTED}."),
        (
            {HostileKey(): 1},
            (
                "args[0]: the key <HostileKey that cannot be printed> is HostileKey,"
                " but JSON has only string keys."
            ),
        ),
    ],
    ids=kind,
)
def test_a_class_that_lies_and_a_repr_that_raises_are_refused_like_any_other(value, text):
    assert refusal(value) == text


# ── Whatever is generated ─────────────────────────────────────────────────────────────────────────────────

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(min_value=-(10**5000), max_value=10**5000),
    st.floats(),
    st.sampled_from([1e308, -0.0, 5e-324, 1e22, 1e16, math.nextafter(1e16, 0)]),
    st.text(st.characters(exclude_categories=[]), max_size=20),  # surrogates included
    st.sampled_from(["\x00", "\ud800", "\\u0000", "\udfff\ud800"]),
    st.builds(Text, st.text()),
    st.builds(Number, st.integers()),
    st.builds(Fraction, st.floats()),
    st.sampled_from([Colour.RED, Level.HIGH]),
)
refused = st.one_of(
    st.builds(lambda: Liar()),
    st.sampled_from([object(), {1}, b"", Decimal(1), datetime(2026, 1, 2)]),
)
keys = st.one_of(st.text(st.characters(exclude_categories=[]), max_size=5), st.sampled_from([1, None, (2,)]))
values = st.recursive(
    st.one_of(scalars, scalars, scalars, refused),
    lambda inner: st.one_of(
        st.lists(inner, max_size=5),
        st.lists(inner, max_size=5).map(tuple),
        st.lists(inner, max_size=5).map(Many),
        st.dictionaries(keys, inner, max_size=5),
        st.dictionaries(st.text(string.ascii_letters), inner, max_size=5).map(Mapping),
    ),
    max_leaves=20,
)


def as_stored(value: object) -> object:
    """What a value is after it was stored: of the basic types."""
    if isinstance(value, dict):
        return {str.__str__(key): as_stored(item) for key, item in dict.items(value)}
    if isinstance(value, list):
        return [as_stored(item) for item in list.__iter__(value)]
    if isinstance(value, tuple):
        return [as_stored(item) for item in value]
    return value


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(args=st.lists(values, max_size=3), kwargs=st.dictionaries(st.text(), values, max_size=3))
def test_every_value_comes_back_equal_or_is_refused_before_any_sql(db, args, kwargs):
    try:
        text = encode_arguments(args, kwargs, LIMIT)
    except InvalidArguments:
        return
    assert text.isascii()
    assert decode_arguments(through_jsonb(text)) == (as_stored(args), as_stored(kwargs))


@settings(max_examples=300, deadline=None)
@given(value=values)
def test_the_fast_way_writes_what_the_slow_way_writes(value):
    with pytest.MonkeyPatch.context() as patch:
        fast = encode_result([value], LIMIT)
        patch.setattr(payload, "_is_plain", lambda *args: False)
        slow = encode_result([value], LIMIT)

    assert fast == slow


@settings(max_examples=200, deadline=None)
@given(value=values, limit=st.integers(1, 200))
def test_every_result_becomes_json_or_a_reason(value, limit):
    text, problem = encode_result(value, limit)

    assert text is None or (json.loads(text) == as_stored(value) and len(text) <= limit)
    assert text is None or problem == ""
    assert value is None or text is not None or problem.startswith("The result could not be stored: ")


# ── Results ───────────────────────────────────────────────────────────────────────────────────────────────


def test_none_is_no_result():
    assert encode_result(None, LIMIT) == (None, "")


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), ("", '""'), ([], "[]"), ({"a": (1, 2)}, '{"a": [1, 2]}')]
)
def test_a_result_is_json_text(value, text):
    assert encode_result(value, LIMIT) == (text, "")


def test_a_result_that_is_too_large_is_not_kept():
    assert encode_result("x" * 100, 50) == (
        None,
        "The result could not be stored: it takes more than 50 bytes as JSON.",
    )


# ── What the table holds ──────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("{}", ([], {})),
        ('{"args": [1]}', ([1], {})),
        ('{"kwargs": {"a": 1}}', ([], {"a": 1})),
        ('{"args": [], "kwargs": {"": [1.50, 1e2]}}', ([], {"": [1.5, 100.0]})),
    ],
)
def test_absent_parts_of_a_payload_are_empty(text, call):
    assert decode_arguments(text) == call


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[1]", "The payload must be an object, not list."),
        ("5", "The payload must be an object, not int."),
        ("null", "The payload must be an object, not NoneType."),
        ('"text"', "The payload must be an object, not str."),
        ('{"arg": [], "x": {}}', "The payload may have the keys 'args' and 'kwargs', not ['arg', 'x']."),
        ('{"args": {}}', "In the payload, 'args' must be an array and 'kwargs' an object."),
        ('{"kwargs": []}', "In the payload, 'args' must be an array and 'kwargs' an object."),
        ('{"args": null}', "In the payload, 'args' must be an array and 'kwargs' an object."),
        ("", "The payload cannot be read: Expecting value: line 1 column 1 (char 0)."),
    ],
)  # fmt: skip
def test_a_payload_of_another_shape_is_refused(text, problem):
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        decode_arguments(text)
    assert str(caught.value) == problem


def test_a_number_that_only_postgres_can_read_is_refused(db):
    with pytest.raises(ValueError, match=r"^The payload cannot be read: Exceeds the limit \(4300 digits\)"):
        decode_arguments(through_jsonb('{"args": [1e5000]}'))


def test_a_payload_of_a_depth_that_python_cannot_read_is_refused(db):
    """Postgres can read it, and so can Python 3.13."""
    stored = through_jsonb('{"args": ' + "[" * 5000 + "]" * 5000 + "}")
    if sys.version_info >= (3, 13):
        args, kwargs = decode_arguments(stored)
        assert (len(args), kwargs) == (1, {})
    else:
        with pytest.raises(ValueError, match=r"^The payload cannot be read: .*recursion depth"):
            decode_arguments(stored)


@settings(max_examples=200, deadline=None)
@given(
    st.one_of(
        st.text(),
        st.recursive(
            st.one_of(st.none(), st.integers(), st.floats(), st.text()),
            lambda inner: st.lists(inner) | st.dictionaries(st.sampled_from(["args", "kwargs", "x"]), inner),
        ).map(json.dumps),
    )
)
def test_decoding_raises_nothing_but_valueerror(text):
    try:
        args, kwargs = decode_arguments(text)
    except ValueError:
        return
    assert isinstance(args, list)
    assert isinstance(kwargs, dict)


# ── Texts ─────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("text", "cleaned"),
    [
        ("plain\ttext\nof two lines é\U0001f600", "plain\ttext\nof two lines é\U0001f600"),
        ("a\x00b", "a\\x00b"),
        ("\ud800", "\\ud800"),
        ("\x1b[31mred", "\\x1b[31mred"),
        ("one\r\ntwo\rthree", "one\ntwo\\x0dthree"),
        ("\x7f\x85\x9f", "\\x7f\\x85\\x9f"),
        (Text("text"), "text"),
        ("x" * 100, "x" * 100),
        ("a" * 100 + "z" * 100, "a" * 35 + " … [130 characters cut] … " + "z" * 35),
    ],
    ids=kind,
)
def test_a_text_becomes_one_that_postgres_and_people_can_read(text, cleaned):
    assert clean_text(text, 100) == cleaned
    assert type(clean_text(text, 100)) is str


@pytest.mark.parametrize("limit", [100, 1500, 5000])
@pytest.mark.parametrize(
    "text",
    ["x", "é", "\U0001f600", '"', "\\", "\x00", "\ud800", "\n", "\U0001f600a", "a\U0001f600" * 9 + "a" * 99],
)
def test_a_cut_text_fits_and_wastes_little(text, limit):
    cleaned = clean_text(text * 10_000, limit)

    assert limit * 0.8 - 20 <= len(json.dumps(cleaned, ensure_ascii=False).encode()) - 2 <= limit
    assert " characters cut] … " in cleaned


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(text=st.text(st.characters(exclude_categories=[]), max_size=500), limit=st.integers(100, 300))
def test_a_cleaned_text_can_always_be_stored(db, text, limit):
    cleaned = clean_text(text, limit)

    assert len(json.dumps(cleaned, ensure_ascii=False).encode()) - 2 <= limit
    assert json.loads(through_jsonb(json.dumps(cleaned))) == cleaned


def test_fifty_megabytes_are_cut_as_cheaply_as_fifty_kilobytes():
    assert clean_text("x" * 50_000_000, 1000).count("x") > 900
