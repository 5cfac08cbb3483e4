"""Fields as projects write them: with code of their own between the value and the column."""

from __future__ import annotations

import base64
import warnings
from typing import Any

from django.db import connection, models

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Django 6.1 renames get_placeholder and still accepts it

    class LoudField(models.CharField):  # type: ignore[type-arg]  # Django's classes take none at run time
        """Wraps its value into SQL."""

        def get_placeholder(self, value: Any, compiler: Any, connection: Any) -> str:
            return "upper(%s)"


class SealedField(models.TextField):  # type: ignore[type-arg]  # Django's classes take none at run time
    """Stored in another form, like an encrypted field."""

    def get_db_prep_save(self, value: Any, connection: Any) -> Any:
        if value is None or hasattr(value, "as_sql"):
            return value
        return base64.b64encode(value.encode()).decode()

    def from_db_value(self, value: Any, expression: Any, connection: Any) -> str | None:
        return None if value is None else base64.b64decode(value).decode()


class SizeField(models.IntegerField):  # type: ignore[type-arg]  # Django's classes take none at run time
    """Counts, at each insert, the rows that are there already."""

    def pre_save(self, model_instance: models.Model, add: bool) -> int:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT count(*) FROM {model_instance._meta.db_table}")
            value: int = cursor.fetchone()[0]
        setattr(model_instance, self.attname, value)
        return value


class CallsField(models.IntegerField):  # type: ignore[type-arg]  # Django's classes take none at run time
    """Counts how often it was asked."""

    calls = 0

    def pre_save(self, model_instance: models.Model, add: bool) -> int:
        CallsField.calls += 1
        return CallsField.calls
