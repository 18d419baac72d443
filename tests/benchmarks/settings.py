from tests.settings import *  # noqa: F403

INSTALLED_APPS = ["django_pgjobs", "django.contrib.contenttypes", "tests.benchmarks"]
ROOT_URLCONF = None
