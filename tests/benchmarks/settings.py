"""The project whose queue is measured: nothing but the queue and one table for the jobs that use the ORM."""

import json
import os

import environ

DATABASES = {"default": environ.Env.db_url_config(os.environ["DATABASE_URL"])}
INSTALLED_APPS = ["django_pgjobs", "django.contrib.contenttypes", "tests.benchmarks"]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PGJOBS = json.loads(os.environ.get("PGJOBS_BENCHMARK_SETTINGS", "{}"))
SECRET_KEY = "for benchmarks only"
USE_TZ = True
