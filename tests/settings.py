import json
import os
from importlib.util import find_spec

import django

from tests.database import databases

DATABASES = databases()

INSTALLED_APPS = [
    "django_pgjobs",
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "tests",
]
MIDDLEWARE = [
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]
TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
            ],
        },
    },
]
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
# Tests give the workers that they start settings of their own.
PGJOBS = json.loads(os.environ.get("PGJOBS_TEST_SETTINGS", "{}"))
ROOT_URLCONF = "tests.urls"
# On Django 5.2, tasks are those of the backport. Without it, nothing reads this.
TASKS = {
    "default": {"BACKEND": "django_pgjobs.backends.PostgresBackend", "QUEUES": ["default", "queue-1"]},
    "second": {
        "BACKEND": "django_pgjobs.backends.PostgresBackend",
        "QUEUES": ["second"],
        "OPTIONS": {"max_attempts": 7},
    },
}
if django.VERSION < (6, 0) and find_spec("django_tasks"):
    INSTALLED_APPS.append("django_tasks")
SECRET_KEY = "for tests only"
STATIC_URL = "static/"
USE_TZ = True
