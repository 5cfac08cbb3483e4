"""`AddEventPosition`: a migration operation that gives an event table the number that a projection reads by.

For the commonest home-made shape, a UUID key with a version per aggregate: it has no order over the whole table. ::

    class Event(models.Model):
        id = models.UUIDField(primary_key=True, default=uuid.uuid4)
        position = EventPosition()          # scriba.fields
        …

    class Migration(migrations.Migration):
        operations = [AddEventPosition("event", order_by=("created_at", "version"))]

Afterwards ``makemigrations --check`` is clean. What always holds: the events that are there are numbered by time, but
never against the versions of their own stream, because clocks differ; and no event that is appended meanwhile is
missed, because the table is locked until the migration's transaction ends.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.core.exceptions import FieldDoesNotExist
from django.db import NotSupportedError, models, transaction
from django.db.migrations.operations.base import Operation

from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.fields import EventPosition
from scriba.sources.table_fields import GUESSES

if TYPE_CHECKING:
    from django.db.backends.base.schema import BaseDatabaseSchemaEditor
    from django.db.migrations.state import ProjectState

__all__ = ["AddEventPosition"]


class AddEventPosition(Operation):
    """Add the column `name` to `model_name`, number the rows that are there, and let the database number later ones.

    `order_by`: fields; the first is the time of an event, the others (its version) decide within a stream and among
    equal times. `stream_id`: the field, or the fields, that tell streams apart; guessed when not given. `field`: the
    :class:`~scriba.fields.EventPosition` as the model has it, if it has options.

    Locks the table against writers and readers until the migration's transaction ends: about 10 s for a million rows.
    """

    reversible = True
    reduces_to_sql = True

    def __init__(
        self,
        model_name: str,
        name: str = "position",
        order_by: Sequence[str] = ("created_at", "version"),
        stream_id: str | Sequence[str] | None = None,
        field: EventPosition | None = None,
    ) -> None:
        self.model_name = model_name
        self.name = name
        self.order_by = order_by
        self.stream_id = stream_id
        self.field = field

    def state_forwards(self, app_label: str, state: ProjectState) -> None:
        field = self.field or EventPosition()
        state.add_field(app_label, self.model_name.lower(), self.name, field, preserve_default=True)

    def database_forwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        del from_state
        model = to_state.apps.get_model(app_label, self.model_name)
        connection = schema_editor.connection
        if not self.allow_migrate_model(connection.alias, model):
            return
        if connection.vendor != "postgresql":
            msg = f"AddEventPosition: {connection.alias!r} is {connection.display_name}; positions are drawn by PostgreSQL only."
            raise NotSupportedError(msg)
        statements = self._statements(model, schema_editor.quote_name)
        with transaction.atomic(connection.alias):  # a migration may be atomic = False: then this is its only lock
            for statement in statements:
                schema_editor.execute(statement, params=None)

    def database_backwards(
        self, app_label: str, schema_editor: BaseDatabaseSchemaEditor, from_state: ProjectState, to_state: ProjectState
    ) -> None:
        del to_state
        model = from_state.apps.get_model(app_label, self.model_name)
        if self.allow_migrate_model(schema_editor.connection.alias, model):
            schema_editor.remove_field(model, model._meta.get_field(self.name))

    def references_model(self, name: str, app_label: str) -> bool:
        del app_label
        return name.lower() == self.model_name.lower()

    def references_field(self, model_name: str, name: str, app_label: str) -> bool:
        return self.references_model(model_name, app_label) and name == self.name

    def describe(self) -> str:
        return f"Number the events of {self.model_name} in {self.name}"

    @property
    def migration_name_fragment(self) -> str:
        return f"{self.model_name.lower()}_{self.name.lower()}"

    # --- SQL ----------------------------------------------------------------------------------------------

    def _statements(self, model: type[models.Model], quote: Any) -> list[str]:
        table, column = quote(model._meta.db_table), quote(self._field(model, self.name).column)
        sequence = f"pg_get_serial_sequence({_literal(table)}, {_literal(self._field(model, self.name).column or '')})"
        return [
            f"ALTER TABLE {table} ADD COLUMN {column} bigint",
            f"ALTER TABLE {table} DISABLE TRIGGER USER",  # many event tables refuse every UPDATE
            self._numbering(model, table, column, quote),
            f"ALTER TABLE {table} ENABLE TRIGGER USER",
            "SET CONSTRAINTS ALL IMMEDIATE",  # an ALTER TABLE may not follow checks that are still pending
            f"ALTER TABLE {table} ALTER COLUMN {column} SET NOT NULL",
            f"ALTER TABLE {table} ALTER COLUMN {column} ADD GENERATED BY DEFAULT AS IDENTITY",
            f"SELECT setval({sequence}, max({column})) FROM {table} HAVING max({column}) IS NOT NULL",
            f"ALTER TABLE {table} ADD UNIQUE ({column})",
        ]

    def _numbering(self, model: type[models.Model], table: str, column: str, quote: Any) -> str:
        moment, *rest = (quote(self._field(model, name).column) for name in self.order_by)
        key = quote(model._meta.pk.column)
        streams = [quote(self._field(model, name).column) for name in self._streams(model)]
        within = ", ".join((*rest, key))
        if streams:
            # By time; but an event whose clock was late stands behind the earlier versions of its stream all the same.
            moment = f"max({moment}) OVER (PARTITION BY {', '.join(streams)} ORDER BY {within})"
        return f"""
UPDATE {table} AS event SET {column} = numbered.number FROM (
    SELECT {key}, row_number() OVER (ORDER BY moment, {within}) AS number
    FROM (SELECT *, {moment} AS moment FROM {table}) AS timed) AS numbered
WHERE event.{key} = numbered.{key}"""

    def _streams(self, model: type[models.Model]) -> Sequence[str]:
        if self.stream_id is not None:
            return (self.stream_id,) if isinstance(self.stream_id, str) else self.stream_id
        known = {field.name for field in model._meta.concrete_fields}
        return [name for name in GUESSES["stream_id"] if name in known][:1]

    def _field(self, model: type[models.Model], name: str) -> Any:
        try:
            return model._meta.get_field(name)
        except FieldDoesNotExist:
            known = [field.name for field in model._meta.concrete_fields]
            msg = f"AddEventPosition: {self.model_name} has no field {name!r}{did_you_mean(name, known)}"
            raise ConfigurationError(msg) from None


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"
