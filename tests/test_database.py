import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread

import pytest

from tests import database


@pytest.fixture
def decide_afresh(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    # Set before it is deleted, so that what choose() puts there is taken away again.
    monkeypatch.setenv(database.INHERITED, "")
    monkeypatch.delenv(database.INHERITED)
    monkeypatch.delenv("PGJOBS_TEST_DB", raising=False)
    monkeypatch.delenv("DATABASE_URL", raising=False)
    return monkeypatch


def test_database_url_comes_first(decide_afresh):
    decide_afresh.setenv("DATABASE_URL", "postgres://somebody@db.example/shop")

    assert database.choose() == ("url", "postgres://somebody@db.example/shop", "the server of DATABASE_URL")


def test_children_inherit_the_choice(decide_afresh):
    decide_afresh.setenv("DATABASE_URL", "postgres://somebody@db.example/shop")
    choice = database.choose()
    decide_afresh.setenv("DATABASE_URL", "postgres://somebody@elsewhere.example/shop")

    assert database.choose() == choice


def test_an_impossible_wish_says_why(decide_afresh):
    decide_afresh.setenv("PGJOBS_TEST_DB", "url")

    with pytest.raises(RuntimeError) as raised:
        database.choose()
    assert str(raised.value) == (
        "There is no Postgres for the tests, because:\n  url: DATABASE_URL is not set."
    )


def test_an_unknown_wish_is_refused(decide_afresh):
    decide_afresh.setenv("PGJOBS_TEST_DB", "oracle")

    with pytest.raises(RuntimeError) as raised:
        database.choose()
    assert str(raised.value) == "PGJOBS_TEST_DB is 'oracle'. Use url, embedded, docker or auto."


def test_no_engine_answers_where_there_is_none(decide_afresh, tmp_path):
    decide_afresh.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    decide_afresh.setenv("PGJOBS_TEST_DB", "docker")

    with pytest.raises(RuntimeError, match=r"docker: No Docker engine answers\."):
        database.choose()


def test_an_engine_is_known_by_its_answer(decide_afresh):
    class Engine(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/_ping" else 404)
            self.end_headers()

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Engine) as server:
        decide_afresh.setenv("DOCKER_HOST", f"tcp://127.0.0.1:{server.server_port}")
        answering = Thread(target=server.handle_request)
        answering.start()
        assert database.docker_answers()
        answering.join()


@pytest.mark.django_db(transaction=True, databases=["default", "other"])
def test_a_child_process_uses_the_test_databases(child_environment):
    code = (
        "import django; django.setup()\n"
        "from django.db import connections\n"
        "for alias in connections:\n"
        "    with connections[alias].cursor() as cursor:\n"
        "        cursor.execute('SELECT current_database()')\n"
        "        print(cursor.fetchone()[0])\n"
    )
    child = subprocess.run(
        [sys.executable, "-c", code], env=child_environment, capture_output=True, text=True, check=True
    )

    names = ["PGJOBS_TEST_DATABASE_NAME", "PGJOBS_TEST_OTHER_DATABASE_NAME"]
    assert child.stdout.split() == [child_environment[name] for name in names]
