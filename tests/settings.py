"""Django settings of the test suite. The database comes from tests/support/server.py, which sets DATABASE_URL."""

from __future__ import annotations

import os

import environ

SECRET_KEY = "only for tests"
USE_TZ = True
TIME_ZONE = "UTC"
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
ROOT_URLCONF = "tests.urls"
STATIC_URL = "/static/"
ALLOWED_HOSTS = ["*"]

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "scriba",
    "tests.testapp",
    "tests.property_db.folding.app",
]
#: Apps that other test packages bring along (a test package with models lists itself here).
INSTALLED_APPS += [app for app in os.environ.get("SCRIBA_TEST_APPS", "").split(",") if app]

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
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]

#: Without a URL (mypy, manage.py check) the settings still load; nothing connects.
_URL = os.environ.get("DATABASE_URL") or "postgresql://postgres@localhost:1/postgres"
DATABASES = {
    "default": {**environ.Env.db_url_config(_URL), "TEST": {"NAME": "test_scriba"}},
    "other": {**environ.Env.db_url_config(_URL), "TEST": {"NAME": "test_scriba_other"}},
}
SCRIBA = {"lease_s": 1.0, "busy_poll_s": 0.005, "idle_poll_s": 0.05, "drain_timeout_s": 10.0}
