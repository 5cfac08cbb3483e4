"""Which fields of a model are which parts of an event: as the user says, or guessed from the names that teams use.

Everything that is wrong is found at once and told with the option that cures it: as errors of ``manage.py check``, and
again as one :class:`~scriba.exceptions.ConfigurationError` when a projection starts. No connection is opened.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

from django.apps import apps
from django.core.exceptions import FieldDoesNotExist
from django.db import models

from scriba.exceptions import ConfigurationError, did_you_mean
from scriba.fields import EventPosition

if TYPE_CHECKING:
    from scriba.event import Event

__all__ = ["OPTIONS", "EventFields", "Names", "Problem", "find_fields", "resolve_model"]

#: An option's value: a field's name (``"stream__name"`` follows a foreign key), several to be joined, or a callable.
Names = str | tuple[str, ...] | None
StreamId = Names | Callable[["Event"], str]
AnyField: TypeAlias = "models.Field[Any, Any]"

#: Tried in this order; the first that the model has is taken.
GUESSES: Final[Mapping[str, tuple[str, ...]]] = {
    "stream_id": ("stream_id", "aggregate_id", "originator_id", "entity_id", "object_id"),
    "type": ("event_type", "type", "name", "topic"),
    "data": ("data", "payload", "event_data", "event_payload", "state"),
    "metadata": ("metadata", "event_context", "headers"),
    "occurred_at": ("occurred_at", "created_at", "recorded_at", "timestamp", "event_date"),
    "id": ("event_id", "uuid", "id"),
    "stream_version": (
        "stream_version", "aggregate_version", "originator_version", "version", "event_sequence", "sequence",
    ),
    "correlation_id": ("correlation_id",),
    "causation_id": ("causation_id",),
}  # fmt: skip
POSITION_GUESSES: Final = ("position", "global_position", "global_sequence", "notification_id", "sequence_number")
REQUIRED: Final = ("stream_id", "type", "data")
KINDS: Final[Mapping[str, tuple[type[AnyField], ...]]] = {
    "occurred_at": (models.DateField,),
    "stream_version": (models.IntegerField,),
}
OPTIONS: Final = ("position", *GUESSES)


class Problem(NamedTuple):
    """What a check says: its id, what is wrong, and what to do."""

    id: str
    message: str
    hint: str


class EventFields(NamedTuple):
    """The parts of an event as paths from `model`; ``()`` and None where the table has no such thing.

    `stream_id` is one path or several, or the callable that computes it from the event.
    """

    model: type[models.Model]
    position: str
    stream_id: tuple[str, ...]
    stream_id_of: Callable[[Event], str] | None
    type: str
    data: str
    id: str
    metadata: str | None = None
    occurred_at: str | None = None
    stream_version: str | None = None
    correlation_id: str | None = None
    causation_id: str | None = None

    def field(self, path: str) -> AnyField:
        """Return the model field at the end of `path`."""
        return _walk(self.model, path)


def resolve_model(model: object) -> type[models.Model]:
    """Return the model class that `model` (a class or "app.Model") stands for.

    Raises :class:`~scriba.exceptions.ConfigurationError`. Needs the app registry.
    """
    if isinstance(model, type) and issubclass(model, models.Model):
        return model
    if isinstance(model, str):
        try:
            return apps.get_model(model)
        except (LookupError, ValueError) as error:
            known = (f"{found._meta.app_label}.{found.__name__}" for found in apps.get_models())
            msg = (
                f'TableSource({model!r}): no such model; give a class or "app_label.Model"{did_you_mean(model, known)}'
            )
            raise ConfigurationError(msg) from error
    msg = f'TableSource({model!r}): the first argument is a model class or "app_label.Model".'
    raise ConfigurationError(msg)


def find_fields(model: type[models.Model], given: Mapping[str, Any]) -> tuple[EventFields | None, list[Problem]]:
    """Return the fields of `model` that make an event, or everything that is wrong; `given` are the user's options."""
    problems: list[Problem] = []
    found: dict[str, Any] = {}
    for option in GUESSES:
        value = given.get(option)
        if option == "stream_id" and callable(value):
            found["stream_id_of"] = value
        elif value is None:
            found[option] = _guess(model, option, problems)
        else:
            found[option] = _given(model, option, value, problems)
    position = _position(model, given.get("position"), problems)
    if problems or position is None:
        return None, problems
    return _assembled(model, position, found), []


def _assembled(model: type[models.Model], position: str, found: Mapping[str, Any]) -> EventFields:
    streams = found.get("stream_id") or ()
    return EventFields(
        **{
            **found,
            "model": model,
            "position": position,
            "stream_id": (streams,) if isinstance(streams, str) else tuple(streams),
            "stream_id_of": found.get("stream_id_of"),
            "id": found["id"] or position,
        }
    )


# --- options and guesses --------------------------------------------------------------------------------


def _guess(model: type[models.Model], option: str, problems: list[Problem]) -> str | None:
    for name in GUESSES[option]:
        field = _field_or_none(model, name)
        if field is not None and isinstance(field, KINDS.get(option, (models.Field,))):
            return name
    if option in REQUIRED:
        problems.append(
            Problem(
                "scriba.E211",
                f"{_label(model)} has no field that looks like the event's {option}.",
                f"Name it: TableSource({model.__name__}, {option}=…). Names tried: {', '.join(GUESSES[option])}; "
                f"the model has: {', '.join(_names(model))}.",
            )
        )
    return None


def _given(model: type[models.Model], option: str, value: Any, problems: list[Problem]) -> Any:
    paths = value if isinstance(value, tuple) and option == "stream_id" and value else (value,)
    for path in paths:
        field, problem = _path(model, option, path)
        if problem is None and field is not None and not isinstance(field, KINDS.get(option, (models.Field,))):
            kinds = " or ".join(kind.__name__ for kind in KINDS[option])
            problem = Problem(
                "scriba.E213",
                f"{_label(model)}.{path} is a {type(field).__name__}, and cannot be the event's {option}.",
                f"Name a {kinds} for {option}=…, or leave the option out.",
            )
        if problem is not None:
            problems.append(problem)
    return value


def _path(model: type[models.Model], option: str, path: Any) -> tuple[AnyField | None, Problem | None]:
    hint = f"The model has: {', '.join(_names(model))}."
    if not isinstance(path, str) or not path:
        accepted = "a field's name, a tuple of names, or a callable" if option == "stream_id" else "a field's name"
        return None, Problem(
            "scriba.E212", f"TableSource({model.__name__}): {option}={path!r} must be {accepted}.", hint
        )
    try:
        return _walk(model, path), None
    except FieldDoesNotExist:
        message = f"TableSource({model.__name__}): {option}={path!r} is no field of {_label(model)}{did_you_mean(path, _names(model))}"
        return None, Problem("scriba.E212", message, f"{hint} A foreign key is followed with two underscores.")


def _walk(model: type[models.Model], path: str) -> AnyField:
    """Return the field at the end of `path`; FieldDoesNotExist for a step that is missing or leads to many rows."""
    here: Any = model
    field: Any = None
    for step in path.split("__"):
        if here is None:
            raise FieldDoesNotExist(path)
        field = here._meta.pk if step == "pk" else here._meta.get_field(step)
        if not getattr(field, "concrete", False) or getattr(field, "many_to_many", False) or field.column is None:
            raise FieldDoesNotExist(path)
        here = field.related_model
    found: AnyField = field
    return found


def _field_or_none(model: type[models.Model], name: str) -> AnyField | None:
    try:
        return _walk(model, name)
    except FieldDoesNotExist:
        return None


# --- position -------------------------------------------------------------------------------------------


def _position(model: type[models.Model], given: Any, problems: list[Problem]) -> str | None:
    if given is not None:
        return _given_position(model, given, problems)
    own = _own_fields(model)
    unique = [
        name for name, field in own.items() if isinstance(field, models.IntegerField) and _is_unique(model, field)
    ]
    drawn = [name for name, field in own.items() if isinstance(field, EventPosition)]
    for name in (*drawn, *(guess for guess in POSITION_GUESSES if guess in unique)):
        return name
    if model._meta.pk.name in unique:
        return str(model._meta.pk.name)
    problems.append(
        Problem(
            "scriba.E215",
            f"{_label(model)} has no number that grows over the whole table: its key is a "
            f"{type(model._meta.pk).__name__}, and a version inside each stream is no order between streams.",
            f"Add one: `position = EventPosition()` (scriba.fields) in the model, and in a migration "
            f'`AddEventPosition("{model._meta.model_name}", order_by=(…))` (scriba.operations), which numbers the '
            "events that are there, by time and version. Or name a unique integer: position=….",
        )
    )
    return None


def _given_position(model: type[models.Model], given: Any, problems: list[Problem]) -> str | None:
    field, problem = _path(model, "position", given)
    if field is not None and given not in {"pk", *_own_fields(model)}:
        problem = Problem(
            "scriba.E212",
            f"TableSource({model.__name__}): position={given!r} lies in another table.",
            "The position must be a column of the event table itself.",
        )
    elif field is not None and not isinstance(field, models.IntegerField):
        problem = Problem(
            "scriba.E213",
            f"{_label(model)}.{given} is a {type(field).__name__}: a position is a whole number.",
            "Name an integer column that a sequence fills (BigAutoField, EventPosition).",
        )
    elif field is not None and not _is_unique(model, field):
        problem = Problem(
            "scriba.E214",
            f"{_label(model)}.{given} is not unique: two events at one position cannot be told apart.",
            "Add unique=True, or name another column: position=….",
        )
    if problem is not None:
        problems.append(problem)
        return None
    return str(given)


def _own_fields(model: type[models.Model]) -> dict[str, AnyField]:
    """Return the fields whose columns are in the model's own table, also for a proxy; not those of a parent."""
    concrete: Any = model._meta.concrete_model
    return {field.name: field for field in concrete._meta.local_concrete_fields}


def _is_unique(model: type[models.Model], field: AnyField) -> bool:
    constraints = model._meta.total_unique_constraints
    return field.unique or any(tuple(constraint.fields) == (field.name,) for constraint in constraints)


def _names(model: type[models.Model]) -> Sequence[str]:
    return [field.name for field in model._meta.concrete_fields]


def _label(model: type[models.Model]) -> str:
    return model._meta.label
