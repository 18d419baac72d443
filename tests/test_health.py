"""What probes are told, and when a worker host ends or goes on by itself: with real workers."""

from __future__ import annotations

import http.client
import io
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from django_pgjobs import endpoint, health
from django_pgjobs.channel import clock
from django_pgjobs.endpoint import Unavailable
from django_pgjobs.health import Beat
from django_pgjobs.management import arguments
from tests import tasks
from tests.models import Effect
from tests.workers import Worker, Workers, is_running, until

NO_POLLING = ("--poll-interval", "3600")


def get(worker: Worker, path: str) -> tuple[int, str]:
    worker.until_said("Health is told at port")
    (port,) = re.findall(r"Health is told at port (\d+)", worker.log.read_text())
    connection = http.client.HTTPConnection("127.0.0.1", int(port), timeout=30)
    connection.request("GET", path)
    response = connection.getresponse()
    return response.status, response.read().decode()


def check(path: Path, *options: str) -> str:
    """What checkjobs says, whether or not it likes it."""
    said = io.StringIO()
    try:
        call_command("checkjobs", *options, health_file=path, stdout=said)
    except CommandError as error:
        return str(error)
    return said.getvalue().strip()


@pytest.mark.processes
def test_probes_are_told_that_a_worker_is_alive_and_ready(workers: Workers, tmp_path: Path) -> None:
    file = tmp_path / "health"
    worker = workers.start("--health-port", "127.0.0.1:0", "--health-file", str(file))
    assert get(worker, "/livez") == (200, "ok\n")
    until(lambda: get(worker, "/readyz") == (200, "ok\n"))
    assert get(worker, "/readyz?verbose") == (200, "ok\n")
    assert get(worker, "/")[0] == 404
    until(lambda: check(file, "--ready") == f"Worker {worker.pid} is ready.")
    assert check(file) == f"Worker {worker.pid} is alive."
    assert worker.stop() == 0
    assert check(file).endswith("cannot be read: No such file or directory.")


@pytest.mark.processes
def test_a_worker_that_is_stopping_is_not_ready(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--health-port", "127.0.0.1:0")
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: job.refresh().status == "processing")
    until(lambda: get(worker, "/readyz")[0] == 200)
    worker.signal(signal.SIGTERM)
    until(lambda: get(worker, "/readyz") == (503, "The worker is stopping.\n"))
    assert get(worker, "/livez") == (200, "ok\n")
    (tmp_path / "go").touch()
    assert worker.wait() == 0


@pytest.mark.processes
def test_without_its_database_a_worker_is_alive_and_not_ready(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    workers = Workers(tmp_path, child_environment | {"PGJOBS_TEST_DATABASE_NAME": "no_such_database"})
    try:
        worker = workers.start("--health-port", "127.0.0.1:0")
        worker.until_said("Ready to run jobs.")
        until(lambda: get(worker, "/readyz") == (503, "The database has not answered yet.\n"))
        assert get(worker, "/livez") == (200, "ok\n")
        worker.until_said('database "no_such_database" does not exist')
    finally:
        workers.end()


@pytest.mark.processes
def test_a_worker_with_which_the_database_refuses_to_work_ends(
    tmp_path: Path, child_environment: dict[str, str]
) -> None:
    """Here for want of tables. An orchestrator is to see it fail."""
    workers = Workers(tmp_path, child_environment | {"PGJOBS_TEST_DATABASE_NAME": "postgres"})
    try:
        worker = workers.start(settings={"LEASE": 0.5})
        assert worker.wait() == 1
        assert worker.said("does not exist")
        assert worker.said("The database has refused to work with this worker for three leases, so it ends.")
    finally:
        workers.end()


@pytest.mark.parametrize("ago", [31.0, -1000.0])
def test_a_silent_worker_is_neither_alive_nor_ready(ago: float) -> None:
    """Neither is one whose sign of life is from before the machine was started."""
    beat = Beat(7, clock() - ago)
    assert beat.why_not_alive() == f"Worker 7 has given no sign of life for {abs(ago):.0f} s."
    assert beat.why_not_ready() == beat.why_not_alive()


@pytest.mark.parametrize(
    "text", ["", "{}", "[1]", "null", '{"pid": 1', '{"pid": 1, "at": "x", "why_not": ""}']
)
def test_a_file_that_is_no_health_file_is_said_to_be_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "health").write_text(text)
    assert check(tmp_path / "health") == f"{tmp_path / 'health'} is not the health file of a worker."


def test_slow_clients_are_hung_up_on_and_further_ones_sent_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "CLIENT_TIMEOUT", 0.5)
    before = threading.active_count()
    told = health.Health(address=("127.0.0.1", 0))
    try:
        told.beat("")
        port = port_of(told)
        clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(3 * endpoint.CLIENTS)]
        for client in clients:
            client.send(b"G")
        for client in clients:
            client.settimeout(30)
            try:
                assert client.recv(100) == b""
            except ConnectionResetError:
                pass
            client.close()
        until(lambda: threading.active_count() == before + 1)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as response:
            assert response.read() == b"ok\n"
    finally:
        told.close()


def port_of(told: health.Health) -> int:
    assert told.endpoint is not None
    return told.endpoint.port


@pytest.mark.parametrize("host", ["", "::1", "localhost"])
def test_health_is_told_at_any_kind_of_address(host: str) -> None:
    told = health.Health(address=(host, 0))
    try:
        asked = {"": "127.0.0.1", "::1": "[::1]"}.get(host, host)
        with urllib.request.urlopen(f"http://{asked}:{port_of(told)}/livez", timeout=30) as response:
            assert response.status == 200
    finally:
        told.close()


def test_a_host_leaves_the_health_file_of_its_successor_alone(tmp_path: Path) -> None:
    first = health.Health(tmp_path / "health")
    (tmp_path / "health").write_text(json.dumps(Beat(first.last_beat.pid + 1, clock())._asdict()))
    first.close()
    assert health.read(tmp_path / "health").why_not_alive() == ""
    assert [path.name for path in tmp_path.iterdir()] == ["health"]


def test_a_health_file_that_cannot_be_removed_does_not_matter(tmp_path: Path) -> None:
    told = health.Health(tmp_path / "health")
    (tmp_path / "health").unlink()
    (tmp_path / "health").mkdir()
    told.beat("")
    told.close()


@pytest.mark.processes
def test_a_worker_without_executors_is_not_ready(workers: Workers) -> None:
    """It cannot fork, say, and may never be able to again."""
    worker = workers.start("--processes", "1", "--health-port", "127.0.0.1:0")
    until(lambda: get(worker, "/readyz")[0] == 200)
    (fork_server,) = [pid for pid in worker.descendants() if is_child(pid, worker.pid)]
    os.kill(fork_server, signal.SIGSTOP)
    for pid in worker.descendants():
        if pid != fork_server:
            os.kill(pid, signal.SIGKILL)
    until(lambda: get(worker, "/readyz") == (503, "No executor is ready.\n"))
    os.kill(fork_server, signal.SIGCONT)
    until(lambda: get(worker, "/readyz")[0] == 200)


@pytest.mark.processes
def test_a_worker_that_waits_for_its_last_jobs_sleeps(workers: Workers, tmp_path: Path) -> None:
    worker = workers.start("--processes", "1", *NO_POLLING).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"))
    until(lambda: job.refresh().status == "processing")
    worker.signal(signal.SIGTERM)
    worker.until_said("stopping.")
    before = sleeps(worker.pid)
    until(lambda: sleeps(worker.pid) > before, what="the supervisor to sleep")
    (tmp_path / "go").touch()
    assert worker.wait() == 0


def sleeps(pid: int) -> int:
    """How often the main thread has gone to sleep of its own accord."""
    status = Path(f"/proc/{pid}/task/{pid}/status")
    if not status.exists():
        pytest.skip("Only Linux tells how often a thread has gone to sleep.")
    (count,) = re.findall(r"^voluntary_ctxt_switches:\s+(\d+)", status.read_text(), re.M)
    return int(count)


def test_what_cannot_be_told_is_an_error_at_once(tmp_path: Path) -> None:
    with pytest.raises(Unavailable, match="cannot be written: No such file or directory"):
        health.Health(tmp_path / "missing" / "health")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(Unavailable, match=rf"Nothing can listen on 127\.0\.0\.1:{port}: .*in use"):
            health.Health(address=("127.0.0.1", port))


@pytest.mark.processes
def test_a_port_that_is_taken_is_an_error_of_the_command(workers: Workers) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        worker = workers.start("--health-port", f"127.0.0.1:{taken.getsockname()[1]}")
        assert worker.wait() == 1
    assert worker.said("CommandError: Nothing can listen on")
    assert not worker.said("Traceback")


def test_addresses_and_sizes_on_the_command_line() -> None:
    assert arguments.address("8080") == ("", 8080)
    assert arguments.address("127.0.0.1:0") == ("127.0.0.1", 0)
    assert arguments.address("[::1]:80") == ("::1", 80)
    assert [arguments.size(text) for text in ("7", "5k", "500M", "2G")] == [7, 5 * 2**10, 500 * 2**20, 2**31]
    for parse, text in [
        (arguments.address, "a"),
        (arguments.address, "65536"),
        (arguments.address, ":80"),
        (arguments.address, "::1:80"),
        (arguments.file_path, ""),
        (arguments.file_path, "/"),
        (arguments.size, "0"),
        (arguments.size, "1.5G"),
        (arguments.size, "-1"),
    ]:
        with pytest.raises(arguments.ArgumentTypeError, match=re.escape(repr(text))):
            parse(text)


@pytest.mark.processes
def test_a_worker_may_stop_with_its_parent(workers: Workers, tmp_path: Path) -> None:
    """Started by a shell that does not pass signals on, it would else outlive its container's stop."""
    shell = [sys.executable, "-c", "import subprocess, sys; subprocess.run(sys.argv[1:])"]
    parent = workers.start("--stop-with-parent", below=shell).until_listening()
    (worker,) = [pid for pid in parent.descendants() if is_child(pid, parent.pid)]
    parent.signal(signal.SIGKILL)
    until(lambda: not is_running(worker))
    assert parent.said("The parent process has ended: stopping.")


def is_child(pid: int, parent: int) -> bool:
    shown = subprocess.run(["ps", "-o", "ppid=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return shown.stdout.strip() == str(parent)


@pytest.mark.processes
def test_an_executor_that_has_grown_too_large_is_replaced(workers: Workers, tmp_path: Path) -> None:
    """Once it is done with what it runs."""
    worker = workers.start(
        "--processes", "1", "--threads", "2", "--max-memory-per-executor", "300M", *NO_POLLING
    ).until_listening()
    neighbour = tasks.wait_for_file.enqueue(str(tmp_path / "go"), "neighbour")
    large = tasks.keep_in_memory.enqueue(300 * 2**20)
    worker.until_said("MiB and is replaced.")
    after = tasks.note.enqueue("after")
    until(lambda: after.refresh().status == "completed")
    (tmp_path / "go").touch()
    until(lambda: neighbour.refresh().status == large.refresh().status == "completed")
    assert (neighbour.attempts, large.attempts) == (1, 1)
    pids = dict(Effect.objects.values_list("what", "pid"))
    assert pids["after"] != pids["neighbour started"] == pids["neighbour ended"]
    until(lambda: not is_running(pids["neighbour started"]))


@pytest.mark.processes
def test_a_host_that_was_stopped_beyond_its_lease_ends_what_it_lost(workers: Workers, tmp_path: Path) -> None:
    """What it ran meanwhile runs elsewhere."""
    settings = {"LEASE": 1, "SWEEP_INTERVAL": 0.2, "LOST_DELAY": 0}
    first = workers.start("--processes", "1", settings=settings).until_listening()
    job = tasks.wait_for_file.enqueue(str(tmp_path / "go"), "job")
    until(lambda: Effect.objects.filter(what="job started").exists())
    first.signal(signal.SIGSTOP)
    second = workers.start("--processes", "1", settings=settings).until_listening()
    until(lambda: Effect.objects.filter(what="job started").count() == 2)
    first.signal(signal.SIGCONT)
    first.until_said("longer than its lease of 1 s")
    first.until_said("the claim was lost")
    until(lambda: Effect.objects.filter(what="job stopped").exists())
    (tmp_path / "go").touch()
    until(lambda: job.refresh().status == "completed")
    assert Effect.objects.filter(what="job ended").count() == 1
    next_one = tasks.note.enqueue("next")
    until(lambda: next_one.refresh().status == "completed")
    assert (first.stop(), second.stop()) == (0, 0)
