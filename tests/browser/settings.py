"""The tests' settings, of a site whose Content-Security-Policy is as strict as Django's admin can bear."""

import django

from tests.settings import *  # noqa: F403
from tests.settings import INSTALLED_APPS, MIDDLEWARE, TEMPLATES

ALLOWED_HOSTS = ["127.0.0.1"]
INSTALLED_APPS += ["django.contrib.staticfiles"]
MIDDLEWARE += ["tests.browser.middleware.forget_content_types"]
LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "handlers": {"stderr": {"class": "logging.StreamHandler", "level": "ERROR"}},
    "loggers": {"django.request": {"handlers": ["stderr"]}},
}

# Nothing inline and nothing from elsewhere. Django's admin has nonces for all it loads from 6.1 on.
source = "'self'"
if django.VERSION >= (6, 1):
    from django.utils.csp import CSP

    source = CSP.NONCE
SECURE_CSP = {
    "default-src": ["'none'"],
    "script-src": [source],
    "style-src": [source],
    "img-src": ["'self'"],
    "connect-src": ["'self'"],
    "form-action": ["'self'"],
    "base-uri": ["'none'"],
    "frame-ancestors": ["'none'"],
}
if django.VERSION >= (6, 0):
    MIDDLEWARE += ["django.middleware.csp.ContentSecurityPolicyMiddleware"]
    TEMPLATES[0]["OPTIONS"]["context_processors"] += ["django.template.context_processors.csp"]
else:
    MIDDLEWARE += ["tests.browser.middleware.content_security_policy"]
