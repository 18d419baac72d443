"""Figures as Prometheus reads them. The text is written by `prometheus_client`, which is optional."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from itertools import accumulate
from typing import Any, NamedTuple

from django.core.exceptions import ImproperlyConfigured

OTHER = "(other)"  # stands for the names of queues beyond the first MOST_QUEUES
UNKNOWN = "(unknown)"  # stands for the names of jobs that are not registered
MOST_QUEUES = 200  # that have figures of their own: anyone may invent names

# Seconds. A span of time is counted under the first of these that is not below it.
BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 900.0, 3600.0)


class Distribution:
    """How many spans of time there were of which length, and their sum."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS) + 1)
        self.seconds = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(BOUNDS, seconds)] += 1
        self.seconds += seconds

    def samples(self) -> Iterator[tuple[str, dict[str, str], float]]:
        """Suffix, further labels and value of each line that tells of it."""
        up_to = list(accumulate(self.counts))
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], up_to, strict=True):
            yield "_bucket", {"le": bound}, count
        yield "_count", {}, up_to[-1]
        yield "_sum", {}, self.seconds


class Family(NamedTuple):
    """A counter, gauge or histogram: all figures of one name, by the values of their labels."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...]
    samples: Mapping[tuple[str, ...], float | Distribution]


def counter(name: str, help: str, value: float) -> Family:
    return Family(name, "counter", help, (), {(): value})


def gauge(name: str, help: str, value: float) -> Family:
    return Family(name, "gauge", help, (), {(): value})


def exposition(families: Iterable[Family], accept: str) -> tuple[bytes, str]:
    """The text of these figures, in the format that is asked for by an Accept header, and its type.

    Raises ImproperlyConfigured where prometheus_client is not installed.
    """
    client = require_client()
    encode, content_type = client.exposition.choose_encoder(accept)
    return encode(_Registry(client, families)), content_type


def require_client() -> Any:
    """The package that knows the formats. Raises ImproperlyConfigured where it is not installed."""
    try:
        import_module("prometheus_client.exposition")
        return import_module("prometheus_client")
    except ImportError as error:
        raise ImproperlyConfigured(
            "Metrics need the package prometheus_client, which is not installed. Install it with:"
            " pip install 'django-pgjobs[prometheus]'."
        ) from error


class _Registry:
    """What the encoders of prometheus_client ask for figures."""

    def __init__(self, client: Any, families: Iterable[Family]) -> None:
        self._client = client
        self._families = families

    def collect(self) -> Iterator[Any]:
        for family in self._families:
            base = family.name.removesuffix("_total")
            metric = self._client.Metric(base, family.help, family.kind)
            for values, sample in family.samples.items():
                labels = dict(zip(family.labels, values, strict=True))
                if isinstance(sample, Distribution):
                    for suffix, more, value in sample.samples():
                        metric.add_sample(f"{base}{suffix}", labels | more, value)
                else:
                    metric.add_sample(family.name, labels, sample)
            yield metric
