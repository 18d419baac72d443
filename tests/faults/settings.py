"""The tests' settings for workers behind a pooler, which have a direct connection to the server beside it."""

import json
import os

import environ

from tests.settings import *  # noqa: F403
from tests.settings import DATABASES

DATABASES["default"].setdefault("OPTIONS", {}).update(json.loads(os.environ.get("PGJOBS_TEST_OPTIONS", "{}")))
DATABASES["direct"] = environ.Env.db_url_config(os.environ["PGJOBS_TEST_DIRECT_URL"])
