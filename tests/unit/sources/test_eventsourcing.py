"""EventSourcingSource: what it accepts, what it refuses and why, and that it loads nothing before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

pytest.importorskip("eventsourcing")

from django.db import connections
from eventsourcing import persistence
from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event
from eventsourcing.popo import POPOApplicationRecorder

from scriba.exceptions import ConfigurationError, SourceError
from scriba.protocols import Identity, Shard
from scriba.sources.eventsourcing import EventSourcingSource, LogSubscription, database_env
from scriba.sources.eventsourcing_applications import ApplicationLoader, topics_of

IDENTITY = Identity("dogs", 1)


class Dog(Aggregate):
    @event("Enrolled")
    def __init__(self, name: str) -> None:
        self.name = name

    @event("TrickLearned")
    def learn(self, trick: str) -> None:
        pass


class School(Application):
    pass


class DCBApplication:
    """What the library's applications without streams look like: no subclass of Application."""


class Kennel(Application):
    name = "dogs"
    env = {"DOGS_CREATE_TABLE": "yes", "PERSISTENCE_MODULE": "eventsourcing.sqlite", "SQLITE_DBNAME": ":memory:"}


class RememberingSchool(School):
    """Keeps the environment that it was constructed with."""

    def construct_env(self, name: str, env: Any = None) -> Any:
        type(self).given = dict(env or {})  # type: ignore[attr-defined]
        return super().construct_env(name, env)


def subscribe(source: EventSourcingSource, resume: int | None = None) -> LogSubscription:
    return source.subscribe(IDENTITY, [Shard(resume=resume)])


@contextmanager
def filled(*tricks: str, **options: Any) -> Iterator[tuple[School, LogSubscription]]:
    """A school in memory with one dog and what it learnt, and a subscription to it."""
    school = School()
    dog = Dog("Fido")
    for trick in tricks:
        dog.learn(trick)
    school.save(dog)
    subscription = subscribe(EventSourcingSource(lambda: school, **options))
    try:
        yield school, subscription
    finally:
        subscription.close()


# --- importing ----------------------------------------------------------------------------------------------------


def run_python(code: str) -> str:
    """Run `code` in a fresh interpreter and return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    return done.stdout.strip()


def test_importing_the_source_loads_no_library() -> None:
    """The package eventsourcing is an extra: neither Scriba nor the module of the source imports it."""
    code = (
        "import sys, scriba, scriba.sources.eventsourcing as ours, scriba.sources.eventsourcing_tables;"
        "ours.EventSourcingSource('school.School', topics=['school:Dog.Enrolled']);"
        "print([name for name in sys.modules if name.split('.')[0] == 'eventsourcing'])"
    )
    assert run_python(code) == "[]"


def test_a_missing_library_is_named_with_its_cure() -> None:
    """Declaring is possible; using says what to install."""
    code = (
        "import sys; sys.modules['eventsourcing'] = None;"
        "import scriba.sources.eventsourcing as ours\n"
        "source = ours.EventSourcingSource('school.School')\n"
        "print(source.checks()[0].msg)\n"
        "try: source.subscribe(None, [None])\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    check, raised = run_python(code).splitlines()
    assert 'pip install "scriba[eventsourcing]"' in check
    assert raised == f"ConfigurationError {check}"


# --- the application ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [f"{__name__}.School", f"{__name__}:School"])
def test_an_application_may_be_named_by_a_path(path: str) -> None:
    """Dotted, or in the library's own form with a colon."""
    assert EventSourcingSource(path).identity() == "eventsourcing:School"
    assert EventSourcingSource(path).checks() == []


def test_the_identity_is_the_name_that_tables_are_named_after() -> None:
    """Moving or renaming the class is no other log; another name is."""
    assert EventSourcingSource(Kennel).identity() == "eventsourcing:dogs"


@pytest.mark.parametrize("given", [42, None, School()])
def test_what_is_no_application_is_refused_at_once(given: object) -> None:
    """An application that is already made would be shared with the threads that write."""
    with pytest.raises(ConfigurationError, match="give its class"):
        EventSourcingSource(given)


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (Dog, "cannot be read"),
        (DCBApplication, "cannot be read"),
        ("no.such.module.School", "cannot be imported"),
        (f"{__name__}.Nobody", "cannot be imported"),
        ("School", "cannot be imported"),
        (f"{__name__}.IDENTITY", "cannot be read"),
    ],
)
def test_what_turns_out_to_be_no_application_is_a_check_error(given: object, why: str) -> None:
    """Found by ``manage.py check``, which may import what projections may not yet."""
    source = EventSourcingSource(given)

    (error,) = source.checks()

    assert error.id == "scriba.E202"
    assert why in error.msg
    with pytest.raises(ConfigurationError, match=why):
        subscribe(source)


def test_a_factory_must_make_an_application() -> None:
    """Anything else is named in the message."""
    with pytest.raises(ConfigurationError, match="must return an eventsourcing Application, not 'nothing'"):
        subscribe(EventSourcingSource(lambda: "nothing"))


def test_a_factory_decides_about_its_own_environment() -> None:
    """`env` with a factory would be silently without effect."""
    with pytest.raises(ConfigurationError, match="env= and using= go with an application class"):
        subscribe(EventSourcingSource(lambda: School(), env={"A": "b"}))


def test_a_reader_creates_no_tables_and_opens_few_connections() -> None:
    """Two processes that create tables at one moment fail; the pool's default is five connections."""
    ApplicationLoader(RememberingSchool, None, where="test").construct()

    given = RememberingSchool.given  # type: ignore[attr-defined]
    assert given["CREATE_TABLE"] == given["REMEMBERINGSCHOOL_CREATE_TABLE"] == "no"
    assert given["POSTGRES_POOL_SIZE"] == "1"


def test_a_prefixed_setting_of_the_class_does_not_defeat_the_reader() -> None:
    """In the library a name with the application's prefix wins, so both are set."""
    application = ApplicationLoader(Kennel, None, where="test").construct()

    assert application.env.get("CREATE_TABLE") == "no"
    application.close()


def test_the_sources_own_env_is_the_strongest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stronger than os.environ, than the class, and than what a reader would rather have."""
    monkeypatch.setenv("SCHOOL_POSTGRES_PORT", "1")
    monkeypatch.setenv("POSTGRES_PORT", "2")

    application = ApplicationLoader(School, {"POSTGRES_PORT": "3", "POSTGRES_POOL_SIZE": "9"}, where="test").construct()

    assert application.env.get("POSTGRES_PORT") == "3"
    assert application.env.get("POSTGRES_POOL_SIZE") == "9"


def test_a_prefixed_key_beats_a_plain_one_in_env() -> None:
    """As it does in the library, whatever the order in which they are given."""
    env = {"SCHOOL_POSTGRES_PORT": "4", "POSTGRES_PORT": "3"}

    application = ApplicationLoader(School, env, where="test").construct()

    assert application.env.get("POSTGRES_PORT") == "4"


def test_the_database_may_be_named_by_a_django_alias() -> None:
    """Looked up when the application is constructed: in tests it is the test database."""
    loader = ApplicationLoader(School, {"POSTGRES_SCHEMA": "events"}, where="test", using="other")

    application = loader.construct({"PERSISTENCE_MODULE": "eventsourcing.popo"})

    assert application.env.get("POSTGRES_DBNAME") == connections["other"].settings_dict["NAME"]
    assert application.env.get("POSTGRES_SCHEMA") == "events"
    assert database_env("other")["PERSISTENCE_MODULE"] == "eventsourcing.postgres"


def test_an_alias_that_cannot_serve_is_a_check_error() -> None:
    """Unknown, or no PostgreSQL."""
    (unknown,) = EventSourcingSource(School, using="nowhere").checks()

    assert unknown.id == "scriba.E203"
    assert "nowhere" in unknown.msg
    assert "default" in str(unknown.hint)
    with pytest.raises(ConfigurationError, match="nowhere"):
        subscribe(EventSourcingSource(School, using="nowhere"))
    assert EventSourcingSource(School, using="default").checks() == []


def test_an_application_that_keeps_its_events_in_memory_is_refused() -> None:
    """Each process would have its own, always empty log, and a projection of it would look healthy for ever."""
    with pytest.raises(ConfigurationError, match="PERSISTENCE_MODULE"):
        subscribe(EventSourcingSource(School))


# --- options ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("wakeup", "notify", "listen, poll"),
        ("gaps", "off", "auto, ordered"),
        ("start_from", "beginning", "'origin', 'current'"),
        ("start_from", -1, "'origin', 'current'"),
        ("start_from", True, "'origin', 'current'"),
        ("topics", "a:B", "a list of topics"),
        ("topics", [], "a list of topics"),
        ("topics", [42], "topics or event classes"),
    ],
)
def test_a_wrong_option_is_refused_with_the_accepted_ones(option: str, value: Any, accepted: str) -> None:
    """At once, where the projection is declared."""
    with pytest.raises(ConfigurationError, match=accepted):
        EventSourcingSource(School, **{option: value})


def test_topics_are_names_or_classes() -> None:
    """Of a class its topic."""
    assert topics_of(["a:B", Dog.Enrolled], "test") == ("a:B", f"{__name__}:Dog.Enrolled")  # type: ignore[attr-defined]


def strange_school(recorder: Any) -> School:
    school = School()
    school.recorder = recorder
    return school


class Foreign(persistence.ApplicationRecorder):
    """A third-party recorder that implements the interface over another one."""

    def __init__(self, inner: POPOApplicationRecorder) -> None:
        self.inner = inner
        self.failures: list[Exception] = []

    def insert_events(self, stored_events: Sequence[Any], **kwargs: Any) -> Any:
        return self.inner.insert_events(stored_events, **kwargs)

    def select_events(self, originator_id: Any, **kwargs: Any) -> Any:
        return self.inner.select_events(originator_id, **kwargs)

    def select_notifications(self, *args: Any, **kwargs: Any) -> Any:
        if self.failures:
            raise self.failures.pop()
        return self.inner.select_notifications(*args, **kwargs)

    def max_notification_id(self) -> int | None:
        return self.inner.max_notification_id()

    def subscribe(self, gt: int | None = None, topics: Sequence[str] = ()) -> Any:
        raise NotImplementedError


def test_a_recorder_of_unknown_order_is_refused() -> None:
    """Events that commit out of order would be lost silently, so somebody has to give his word."""
    with pytest.raises(ConfigurationError, match='gaps="ordered"'):
        subscribe(EventSourcingSource(lambda: strange_school(Foreign(POPOApplicationRecorder()))))


def test_a_recorder_of_stated_order_is_read() -> None:
    """Through nothing but the library's interface."""
    inner = POPOApplicationRecorder()
    school = strange_school(Foreign(inner))
    dog = Dog("Fido")
    dog.learn("sit")
    inner.insert_events([school.mapper.to_stored_event(each) for each in dog.collect_events()])

    subscription = subscribe(EventSourcingSource(lambda: school, gaps="ordered"))

    page = subscription.fetch(10, 0)
    assert [each.type for each in page.events] == ["Dog.Enrolled", "Dog.TrickLearned"]
    assert subscription.locate(event_id=f"{dog.id}:2") == ("", 2)
    assert subscription.locate(stream_id=str(uuid4()), stream_version=1) is None


# --- reading in memory --------------------------------------------------------------------------------------------


def test_topics_that_are_left_out_move_the_watermark() -> None:
    """Otherwise a projection of a rare event would start far back after each restart."""
    with filled("sit", "roll", topics=[Dog.Enrolled]) as (_, subscription):  # type: ignore[attr-defined]
        page = subscription.fetch(10, 0)

        assert [each.position for each in page.events] == [1]
        assert page.scanned == 3
        assert page.caught_up


def test_a_full_page_of_a_filtered_log_claims_no_more_than_it_saw() -> None:
    """What comes after its last event has not been looked at."""
    with filled("sit", "roll", "beg", topics=[f"{__name__}:Dog.TrickLearned"]) as (_, subscription):
        page = subscription.fetch(2, 0)

        assert [each.position for each in page.events] == [2, 3]
        assert (page.scanned, page.caught_up) == (3, False)


@pytest.mark.parametrize(("start_from", "first"), [("origin", [1, 2, 3]), ("current", []), (2, [3]), (0, [1, 2, 3])])
def test_where_a_new_projection_begins(start_from: Any, first: list[int]) -> None:
    """At the origin, behind what there is now, or behind a notification id."""
    with filled("sit", "roll", start_from=start_from) as (_, subscription):
        assert [each.position for each in subscription.fetch(10, 0).events] == first


def test_a_resumed_projection_does_not_begin_again() -> None:
    """`start_from` is for the first time only."""
    with filled("sit", "roll") as (school, _):
        subscription = subscribe(EventSourcingSource(lambda: school, start_from="current"), resume=1)

        assert [each.position for each in subscription.fetch(10, 0).events] == [2, 3]


def test_a_log_behind_its_projection_halts() -> None:
    """A store that was restored or truncated would hand out positions that count as read."""
    with filled("sit") as (school, _), pytest.raises(SourceError, match="last position is 2,"):
        subscribe(EventSourcingSource(lambda: school), resume=3)


def test_a_log_that_is_replaced_while_it_is_read_halts() -> None:
    """Found with the next look at the head."""
    with filled("sit") as (school, subscription):
        subscription.fetch(10, 0)
        school.recorder._stored_events.clear()  # type: ignore[attr-defined]

        with pytest.raises(SourceError, match="restored"):
            subscription.head()


def test_an_empty_log_has_no_head() -> None:
    """Nothing to be behind of, and the first event ever is delivered."""
    school = School()
    subscription = subscribe(EventSourcingSource(lambda: school))
    assert subscription.head() is None
    assert subscription.fetch(10, 0) == ([], -1, True, "")

    school.save(Dog("Fido"))

    assert [each.position for each in subscription.fetch(10, 0).events] == [1]


@pytest.mark.parametrize("event_id", ["", "nonsense", "a:b", ":1", f"{UUID(int=7)}:1"])
def test_an_event_that_was_never_recorded_is_located_nowhere(event_id: str) -> None:
    """Whatever text somebody waits for."""
    with filled() as (_, subscription):
        assert subscription.locate(event_id=event_id) is None


def test_an_old_event_is_located_among_many() -> None:
    """The search goes back to the beginning when it has to."""
    with filled() as (school, subscription):
        first = school.recorder.select_notifications(1, 1)[0]
        dog = Dog("Rex")
        for number in range(2_500):
            dog.learn(str(number))
        school.save(dog)

        assert subscription.locate(event_id=f"{first.originator_id}:1") == ("", 1)
        assert subscription.locate(stream_id=str(dog.id), stream_version=7) == ("", 8)


def test_one_event_can_be_read_again() -> None:
    """For the replay of a dead letter; a position that holds nothing is None."""
    with filled("sit") as (_, subscription):
        again = subscription.read(2)
        assert again is not None
        assert again.payload().data.trick == "sit"
        assert subscription.read(3) is None


def test_closing_closes_the_application_once() -> None:
    """Twice is fine."""
    closed: list[int] = []

    class Closing(School):
        def close(self) -> None:
            closed.append(1)

    application = Closing()
    subscription = subscribe(EventSourcingSource(lambda: application))
    subscription.close()
    subscription.close()

    assert closed == [1]


def test_an_application_that_cannot_be_read_is_closed() -> None:
    """A refused start leaves no connection behind."""
    closed: list[int] = []

    class Closing(School):
        def close(self) -> None:
            closed.append(1)

    application = Closing()
    with pytest.raises(SourceError):
        subscribe(EventSourcingSource(lambda: application), resume=5)

    assert closed == [1]


# --- errors -------------------------------------------------------------------------------------------------------


def caused(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (persistence.OperationalError("gone"), True),
        (persistence.InterfaceError("gone"), True),
        (persistence.ProgrammingError("no table"), False),
        (ConnectionResetError(), True),
        (TimeoutError(), True),
        (OSError("Postgres host not found in environment"), False),
        (ValueError(), False),
        (psycopg.OperationalError("connection refused"), True),
        (psycopg.errors.AdminShutdown(), True),
        (psycopg.errors.CannotConnectNow(), True),
        (psycopg.errors.DatabaseDropped(), False),
        (psycopg.errors.InvalidCatalogName(), False),
        (psycopg.errors.InsufficientPrivilege(), False),
        (caused(persistence.OperationalError("x"), psycopg.errors.AdminShutdown()), True),
        (caused(persistence.ProgrammingError("x"), psycopg.errors.UndefinedTable()), False),
        (caused(persistence.OperationalError("x"), psycopg.errors.InvalidCatalogName()), False),
    ],
)
def test_which_errors_may_go_away(error: Exception, *, expected: bool) -> None:
    """Lost connections and busy databases, by SQLSTATE or class; a missing table or setting stays missing."""
    assert EventSourcingSource(School).transient(error) is expected


def test_a_third_party_recorder_names_its_own_errors() -> None:
    """Nobody else knows which they are."""

    class TransportError(RuntimeError):
        pass

    assert not EventSourcingSource(School).transient(TransportError())
    assert EventSourcingSource(School, transient_errors=[TransportError]).transient(TransportError())
