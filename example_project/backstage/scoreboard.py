"""What became of the demo's jobs: live while they run, and as a table at the end."""

import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from math import ceil, inf

from django_pgjobs.models import BackgroundJob

# retried: failed at least once and was tried again. dead: became a dead letter.
# recovered: completed, although an executor died while running it.
COUNTS = ("enqueued", "completed", "retried", "dead", "recovered")


@dataclass
class Score:
    """The jobs of one job function. A pickup is the time from being enqueued to the first start."""

    counts: Counter[str] = field(default_factory=Counter)
    pickups: list[timedelta] = field(default_factory=list)

    @property
    def settled(self) -> int:
        return self.counts["completed"] + self.counts["dead"]

    def pickup(self, percent: int) -> str:
        """Return a percentile, in milliseconds."""
        if not self.pickups:
            return "-"
        nearest = sorted(self.pickups)[ceil(len(self.pickups) * percent / 100) - 1]
        return f"{nearest / timedelta(milliseconds=1):,.1f}"


class Scoreboard:
    """Follows the jobs that are enqueued from now on."""

    def __init__(self) -> None:
        last = BackgroundJob.objects.order_by("pk").last()
        self.jobs = BackgroundJob.objects.filter(pk__gt=last.pk if last else 0)
        self.terminal = sys.stdout.isatty()
        self.started = time.monotonic()
        self.drawn: list[str] = []
        self.said: dict[str, str] = {}
        self.said_at = -inf

    def scores(self) -> dict[str, Score]:
        scores: dict[str, Score] = {}
        for job in self.jobs.order_by("pk").defer("payload", "errors", "result", "metadata"):
            score = scores.setdefault(job.job_name.rpartition(".")[2], Score())
            completed = job.status == "completed"
            score.counts["enqueued"] += 1
            score.counts["completed"] += completed
            score.counts["retried"] += job.attempts - job.crashes > 1
            score.counts["dead"] += job.status == "failed"
            score.counts["recovered"] += completed and job.crashes > 0
            if job.started_at:
                score.pickups.append(job.started_at - job.created_at)
        return scores

    def settled(self) -> bool:
        return not self.jobs.filter(status__in=("queued", "processing")).exists()

    def say(self, *lines: str) -> None:
        """Print lines that stay."""
        self._erase()
        print(*lines, sep="\n", flush=True)

    def watch(self, until: Callable[[], bool], timeout: float = inf) -> bool:
        """Show progress until the condition holds; return whether it did in time."""
        deadline = time.monotonic() + timeout
        while not (held := until()) and time.monotonic() < deadline:
            self._draw()
            time.sleep(0.1)
        self._draw(last=True)
        return held

    def table(self) -> Iterator[str]:
        rows = [("job function", *COUNTS, "pickup p50 ms", "p95 ms")]
        for name, score in self.scores().items():
            counts = (str(score.counts[count]) for count in COUNTS)
            rows.append((name, *counts, score.pickup(50), score.pickup(95)))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for name, *numbers in rows:
            yield "  ".join((name.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])))

    def _draw(self, last: bool = False) -> None:
        scores = self.scores()
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            bars = [self._bar(name, score)[:width] for name, score in scores.items()]
            if bars != self.drawn:
                self._erase()
                print("\n".join(bars), flush=True)
                self.drawn = bars
            return
        now = time.monotonic()
        lines = {name: f"{name} {score.settled}/{score.counts['enqueued']}" for name, score in scores.items()}
        news = [line for name, line in lines.items() if line != self.said.get(name)]
        if news and (last or now > self.said_at + 1):
            print(f"   {now - self.started:5.1f} s  {', '.join(news)}", flush=True)
            self.said, self.said_at = lines, now

    def _erase(self) -> None:
        """Take the bars away; the next ones, or a line, come in their place."""
        if self.drawn:
            print(f"\x1b[{len(self.drawn)}A\x1b[J", end="")
            self.drawn = []

    @staticmethod
    def _bar(name: str, score: Score, width: int = 30) -> str:
        full = width * score.settled // score.counts["enqueued"]
        bar = "█" * full + "░" * (width - full)
        notes = ", ".join(f"{score.counts[count]} {count}" for count in COUNTS[2:] if score.counts[count])
        return f"   {name:<14} {bar} {score.settled:>4}/{score.counts['enqueued']:<4} {notes}"
