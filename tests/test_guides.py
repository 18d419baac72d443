"""The guides for those who operate workers: their configuration files, commands and statements work."""

from __future__ import annotations

import configparser
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.core.management import load_command_class

from django_pgjobs.conf import Config
from tests.factories import make_job
from tests.markdown import HOW_TO, REFERENCE, ROOT, blocks, code, table, tables
from tests.sessions import session
from tests.workers import Workers, until


def options_of(arguments: list[str]) -> dict[str, object]:
    """What runjobs makes of a command line. One that is wrong ends the test."""
    assert arguments[arguments.index("runjobs") - 1] == "manage.py"
    parser = load_command_class("django_pgjobs", "runjobs").create_parser("manage.py", "runjobs")
    return vars(parser.parse_args(arguments_of(arguments)))


def longest_stop(arguments: list[str]) -> float:
    """For how many seconds a host may take to stop, with the default settings."""
    grace: Any = options_of(arguments)["grace"]
    return (grace + Config().LEASE / 4).total_seconds()


def arguments_of(command: list[str]) -> list[str]:
    return command[command.index("runjobs") + 1 :]


def manage(environment: dict[str, str], *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command of manage.py as a reader would, whatever comes of it."""
    command = [sys.executable, "-m", "django", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def answers(url: str) -> bool:
    """Whether somebody is there, and says yes."""
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=10):
            return True
    except OSError:
        return False


# ── systemd ───────────────────────────────────────────────────────────────────────────────────────────────

SYSTEMD = HOW_TO / "run-under-systemd.md"


@pytest.fixture
def unit() -> str:
    (block,) = blocks(SYSTEMD, "ini")
    return block.text


def service(unit: str) -> dict[str, str]:
    parser = configparser.ConfigParser(interpolation=None)
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(unit)
    return dict(parser["Service"])


def test_the_unit_gives_a_worker_the_time_that_it_may_take(unit: str) -> None:
    settings = service(unit)
    assert float(settings["TimeoutStopSec"]) > longest_stop(shlex.split(settings["ExecStart"]))


@pytest.mark.processes
def test_the_command_of_the_unit_runs_and_its_health_file_says_so(
    unit: str, workers: Workers, child_environment: dict[str, str], tmp_path: Path
) -> None:
    command = service(unit)["ExecStart"].replace("/run/pgjobs-%i", str(tmp_path))
    worker = workers.start(*arguments_of(shlex.split(command))).until_listening()
    check = ["checkjobs", "--health-file", str(tmp_path / "health"), "--ready"]
    until(lambda: manage(child_environment, *check).returncode == 0, what="the worker to be ready")
    assert worker.stop() == 0


def test_systemd_takes_the_unit(unit: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("There is no systemd here.")
    file = tmp_path / "pgjobs@.service"
    file.write_text(unit.replace("/srv/shop/venv/bin/python", sys.executable))
    verify = ["systemd-analyze", "verify", "--recursive-errors=no", str(file)]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


# ── Containers ────────────────────────────────────────────────────────────────────────────────────────────

CONTAINERS = HOW_TO / "run-in-containers.md"


@pytest.fixture
def compose() -> str:
    return blocks(CONTAINERS, "yaml")[0].text


@pytest.fixture
def deployment() -> str:
    return blocks(CONTAINERS, "yaml")[1].text


def command_in(configuration: str) -> list[str]:
    (command,) = re.findall(r"^ *command: (\[.*\])$", configuration, re.M)
    return list(json.loads(command))


def test_the_image_starts_a_worker_as_its_first_process() -> None:
    (dockerfile,) = blocks(CONTAINERS, "dockerfile")
    (command,) = re.findall(r"^CMD (.*)$", dockerfile.text, re.M)
    assert options_of(json.loads(command))["queues"] is None


def test_containers_get_the_time_that_a_worker_may_take(compose: str, deployment: str) -> None:
    (for_compose,) = re.findall(r"stop_grace_period: (\d+)s", compose)
    (for_kubernetes,) = re.findall(r"terminationGracePeriodSeconds: (\d+)", deployment)
    assert float(for_compose) > longest_stop(command_in(compose))
    assert float(for_kubernetes) > longest_stop(command_in(deployment))


def test_containers_says_how_long_a_worker_may_take() -> None:
    *_, together = [
        float(row["seconds, with the defaults"]) for row in table(CONTAINERS, "How long to give it")
    ]
    assert together == longest_stop(["manage.py", "runjobs"])


@pytest.mark.processes
def test_the_health_check_of_compose_finds_a_worker_alive(
    compose: str, workers: Workers, child_environment: dict[str, str], tmp_path: Path
) -> None:
    compose = compose.replace("/tmp/pgjobs", str(tmp_path / "health"))
    worker = workers.start(*arguments_of(command_in(compose))).until_listening()
    (check,) = [json.loads(test) for test in re.findall(r"test: (\[.*\])", compose)]
    assert check[:3] == ["CMD", "python", "manage.py"]
    assert manage(child_environment, *check[3:]).returncode == 0
    worker.kill()
    (tmp_path / "health").unlink()
    assert manage(child_environment, *check[3:]).returncode == 1


@pytest.mark.processes
def test_the_probes_of_kubernetes_ask_a_worker_that_is_the_first_process(
    deployment: str, workers: Workers
) -> None:
    container = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*container, "true"], capture_output=True, check=False).returncode:
        pytest.skip("Processes of a container's own are not to be had here.")
    (port,) = re.findall(r"containerPort: (\d+)", deployment)
    arguments = arguments_of(command_in(deployment))
    assert arguments[-2:] == ["--health-port", port]
    worker = workers.start(*arguments[:-1], "127.0.0.1:0", below=container).until_listening()
    assert worker.said("runjobs 1:")
    told = until(lambda: re.search(r"Health is told at port (\d+)", worker.log.read_text()), what="the port")
    for path in set(re.findall(r"path: (/\w+)", deployment)):
        until(lambda: answers(f"http://127.0.0.1:{told[1]}{path}"), what=path)  # noqa: B023 - called at once
    os.kill(worker.descendants()[0], signal.SIGTERM)
    assert worker.wait() == 0


# ── Watching, and keeping the table small ─────────────────────────────────────────────────────────────────

WATCH = HOW_TO / "watch-the-queue.md"
SMALL = HOW_TO / "keep-the-table-small.md"


def shell_blocks(page: Path) -> list[str]:
    return [block.text.strip() for block in blocks(page, "bash")]


@pytest.fixture
def run_in_shell(child_environment: dict[str, str], tmp_path: Path) -> Any:
    """Run what stands in a guide as it stands there; `python manage.py` is the tests' own project."""
    if shutil.which("jq") is None:
        pytest.skip("There is no jq here.")
    (tmp_path / "manage.py").write_text(
        "import sys\nfrom django.core.management import execute_from_command_line as run\nrun(sys.argv)\n"
    )
    environment = {
        **child_environment,
        "PATH": f"{Path(sys.executable).parent}:{child_environment['PATH']}",
        "PYTHONPATH": str(ROOT),
    }

    def run(script: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.mark.django_db(transaction=True)
def test_the_alerts_on_findings(run_in_shell: Any) -> None:
    doctor, but_some, _, _ = shell_blocks(WATCH)

    def found() -> dict[str, str]:
        shown = json.loads(run_in_shell(f"{doctor} --json").stdout)
        return {finding["name"]: finding["severity"] for finding in shown["findings"]}

    assert found()["no-worker"] == "warning"
    make_job()
    names = found()
    assert names["no-worker"] == "error"
    assert run_in_shell(doctor).returncode == 2
    for accepted in (set(names), set(names) - {"no-worker"}):
        script = but_some.replace('["bloat", "paused-queue"]', json.dumps(sorted(accepted)))
        assert (run_in_shell(script).returncode == 0) == ("no-worker" in accepted)


@pytest.mark.django_db(transaction=True)
def test_the_alert_on_a_promise(run_in_shell: Any) -> None:
    _, _, promise, _ = shell_blocks(WATCH)
    make_job(queue_name="emails", run_at=timedelta(seconds=-1))
    make_job(queue_name="slow", run_at=timedelta(seconds=-1000))
    assert run_in_shell(promise).returncode == 0
    make_job(queue_name="emails", run_at=timedelta(seconds=-61))
    assert run_in_shell(promise).returncode == 1


def test_the_table_of_alerts_names_findings_that_there_are() -> None:
    (known,) = tables((REFERENCE / "findings.md").read_text())
    names = {code(row["finding"])[0] for row in known}
    for row in table(WATCH, "Have people woken up"):
        assert set(code(row["finding"])) <= names


@pytest.mark.django_db(transaction=True)
def test_the_commands_and_statements_that_keep_the_table_small(run_in_shell: Any) -> None:
    for script in shell_blocks(SMALL):
        done = run_in_shell(script)
        assert done.returncode == 0, done.stderr
    statements = [block.text for block in blocks(SMALL, "sql")]
    with session() as connection:  # since some of them cannot run in a transaction
        for statement in statements:
            if statement.startswith("ALTER ROLE"):  # which is for the whole server
                with connection.transaction(force_rollback=True):
                    connection.execute(statement)
            else:
                connection.execute(statement)
