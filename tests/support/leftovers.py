"""What tests leave in the database: those that commit under a name of their own take it away, and all are looked after.

A row that stays is found by a test that comes later, and only in some orders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import psycopg
import pytest
from django.apps import apps
from django.db import connections

from tests.support.processes import database_url

__all__ = ["check", "forget"]

#: These hold rows that migrations and Django itself put there.
FILLED_BY_DJANGO = ("auth", "contenttypes", "sites")


def forget(name: str, execute: Callable[[str, list[Any]], object]) -> None:
    """Delete what Scriba's tables keep of the projection `name`, all its versions."""
    segments = "(SELECT id FROM scriba_segments WHERE projection_name = %s)"
    execute(f"DELETE FROM scriba_lanes WHERE segment_id IN {segments}", [name])
    for model in apps.get_app_config("scriba").get_models():
        if model._meta.model_name != "lane":
            execute(f"DELETE FROM {model._meta.db_table} WHERE projection_name = %s", [name])


def check(item: pytest.Item) -> None:
    """Fail `item` if it has left rows in the test database. To be called when its fixtures are gone."""
    if {"db", "transactional_db"}.isdisjoint(getattr(item, "fixturenames", ())):
        return
    if not str(connections["default"].settings_dict["NAME"]).startswith("test_"):
        return  # behind the session's last test the test database is gone, and this is somebody's own
    with psycopg.connect(database_url(), autocommit=True) as connection:
        sql = " UNION ALL ".join(f"SELECT '{table}' WHERE EXISTS (SELECT FROM \"{table}\")" for table in _tables())
        left = [table for (table,) in connection.execute(sql)]
        for table in left:  # so that only the one to blame fails
            connection.execute(f'TRUNCATE "{table}" CASCADE')
    if left:
        pytest.fail(f"rows were left in {', '.join(left)}; see tests/support/leftovers.py", pytrace=False)


def _tables() -> Iterator[str]:
    models = chain.from_iterable(
        config.get_models(include_auto_created=True)
        for config in apps.get_app_configs()
        if config.label not in FILLED_BY_DJANGO
    )
    return (model._meta.db_table for model in models if model._meta.managed)
