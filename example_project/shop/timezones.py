"""The time zone table that the `tzdata` package ships (public domain), and what the shop reads from it."""

from datetime import UTC, datetime, timedelta
from importlib.resources import files
from zoneinfo import ZoneInfo


def table() -> list[dict[str, str]]:
    """Return the rows of zone1970.tab: countries, coordinates, zone, comments."""
    text = files("tzdata").joinpath("zoneinfo", "zone1970.tab").read_text(encoding="utf-8")
    rows = (line.split("\t") for line in text.splitlines() if line and not line.startswith("#"))
    return [
        {"countries": countries, "coordinates": coordinates, "zone": zone, "comments": " ".join(comments)}
        for countries, coordinates, zone, *comments in rows
    ]


def next_clock_change(zone: str) -> datetime | None:
    """Look through the coming year, hour by hour; return None for a place that leaves its clocks alone."""
    start = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    offset = start.astimezone(ZoneInfo(zone)).utcoffset()
    hours = (start + timedelta(hours=hour) for hour in range(1, 366 * 24))
    return next((hour for hour in hours if hour.astimezone(ZoneInfo(zone)).utcoffset() != offset), None)
