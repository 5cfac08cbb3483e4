"""Settings of the example project: ordinary Django, configured by the environment (twelve factors).

``DATABASE_URL`` names the database; ``manage.py`` provides an embedded one when it is not set.
"""

from __future__ import annotations

from pathlib import Path

import environ

BASE_DIR = Path(__file__).resolve().parent
env = environ.Env(DEBUG=(bool, True), ALLOWED_HOSTS=(list, ["*"]))

SECRET_KEY = env.str("SECRET_KEY", default="an example has no secrets")
DEBUG = env.bool("DEBUG")
ALLOWED_HOSTS = env.list("ALLOWED_HOSTS")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.messages",
    "django.contrib.sessions",
    "django.contrib.staticfiles",
    "scriba",
    "example_project.shop",
    "example_project.bank",
    "example_project.elixir_bank",
    "example_project.demo",
    "example_project.bench",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
]

ROOT_URLCONF = "example_project.urls"
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

#: Without a URL the settings load all the same (`check`, `makemigrations`); nothing connects.
DATABASES = {"default": env.db_url("DATABASE_URL", default="postgresql://postgres@localhost/scriba")}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

USE_TZ = True
TIME_ZONE = "UTC"
STATIC_URL = "static/"

SCRIBA = {"lease_s": env.float("SCRIBA_LEASE_S", default=15.0)}

LOGGING = {
    "version": 1,
    "disable_existing_loggers": False,
    "formatters": {"plain": {"format": "%(asctime)s %(levelname)s %(name)s: %(message)s"}},
    "handlers": {"stderr": {"class": "logging.StreamHandler", "formatter": "plain"}},
    "loggers": {"scriba": {"handlers": ["stderr"], "level": env.str("SCRIBA_LOG_LEVEL", default="WARNING")}},
}
