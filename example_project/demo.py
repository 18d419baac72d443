"""The example project at work: from an empty database to a table of what became of every job.

Run by ./example_project/demo, which installs what is needed first. It starts a Postgres of its own (or uses
DATABASE_URL), a mail server, the site and the workers; places orders at the site as customers do; runs jobs
that fail, that fail for good and that kill their own process; imports a data file and kills the executors
on the way; and checks that nothing was lost. Without --once, site and workers then stay until Ctrl-C.
"""

import argparse
import contextlib
import os
import secrets
import shlex
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import django
from backstage.stage import Stage


def report(checks: Iterable[tuple[bool, str]]) -> bool:
    """Print each check; return whether all of them hold."""
    passed = True
    for holds, text in checks:
        print("  ok   " if holds else "  FAIL ", text, flush=True)
        passed &= holds
    return passed


@contextlib.contextmanager
def our_database() -> Iterator[None]:
    """Set Django up, whose settings start a Postgres of our own when there is no DATABASE_URL; see it end."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "config.settings"
    os.environ["EMBEDDED_POSTGRES"] = f"demo-{os.getpid()}"
    django.setup()
    try:
        yield
    finally:
        from config import settings
        from django.db import connections

        connections.close_all()
        if server := getattr(settings, "server", None):
            server.release()
            deadline = time.monotonic() + 10
            while server.directory.parent.exists() and time.monotonic() < deadline:
                time.sleep(0.02)


def prepare_database(password: str) -> None:
    """Migrate, and let "admin" in with the password."""
    from django.contrib.auth import get_user_model
    from django.core.management import call_command
    from django.db import connection

    call_command("migrate", verbosity=0)
    with connection.cursor() as cursor:
        cursor.execute("SHOW server_version")
        (postgres,) = cursor.fetchone()
    print(f"Postgres {postgres}, Django {django.__version__}, Python {sys.version.split()[0]}")
    admin, _ = get_user_model().objects.update_or_create(
        username="admin", defaults={"is_staff": True, "is_superuser": True, "is_active": True}
    )
    admin.set_password(password)
    admin.save()


def jobstats() -> str:
    """Return the command that shows this demo's queue."""
    name = "DATABASE_URL" if "DATABASE_URL" in os.environ else "EMBEDDED_POSTGRES"
    manage = Path(__file__).resolve().with_name("manage.py")
    return shlex.join(
        ["env", f"{name}={os.environ[name]}", sys.executable, str(manage), "jobstats", "--watch"]
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="demo", description=__doc__.partition("\n")[0])
    parser.add_argument("--once", action="store_true", help="exit after the checks; non-zero when one fails")
    parser.add_argument("--orders", type=int, default=40, metavar="N", help="how many orders to place")
    options = parser.parse_args()

    # What ends the demo ends it in good order. (After SIGKILL the children end by themselves, see leash.py.)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # in a shell's background it would be ignored
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as under nohup
        signal.signal(signal.SIGHUP, lambda number, _: sys.exit(128 + number))
    sys.stdout.reconfigure(errors="replace")

    with (
        our_database(),
        tempfile.TemporaryDirectory(prefix="pgjobs-demo-") as directory,
        Stage(Path(directory)) as stage,
    ):
        password = secrets.token_urlsafe(12)
        prepare_database(password)
        stage.set_up()
        print(f"The site is at {stage.address}, its mails and logs are in {directory}", flush=True)

        from backstage.play import Play

        play = Play(stage, options.orders, password)
        play.run()
        play.board.say("", *play.board.table(), "")
        passed = report(play.checks())
        if not options.once:
            print(f"\nThe admin is at {stage.address}admin/ for user admin with password {password}")
            print(f"In numbers, from another terminal: {jobstats()}")
            print("Place orders, retry the dead letter, and watch. Ctrl-C ends everything.\n", flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                play.board.watch(stage.broken)
            play.board.say("")
        stage.clear()
        status = stage.workers.process.returncode
        passed &= report([(status == 0, f"the workers finished what they had begun; exit status {status}")])
        if not passed:
            print(stage.last_words)
    return 0 if passed else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
