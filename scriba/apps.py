"""Django's door: registers the checks and finds ``projections`` modules. No query, no thread."""

from __future__ import annotations

from django.apps import AppConfig
from django.utils.module_loading import autodiscover_modules


class ScribaConfig(AppConfig):
    name = "scriba"
    label = "scriba"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        from scriba import checks  # noqa: F401, PLC0415 - needs the app registry
        from scriba.throttle import install  # noqa: PLC0415 - only for a process that uses Django

        install()
        autodiscover_modules("projections")
