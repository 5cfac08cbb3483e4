"""The decorator, what it refuses, and how a projection is found again."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from scriba import SERIAL, ConfigurationError, RetryPolicy, Skip, UnknownProjection, projection
from scriba.protocols import Identity
from scriba.registry import all_projections, duplicate_identities, find, forget


class Source:
    """The smallest thing that passes for a source."""

    def subscribe(self, identity: object, shards: object) -> None: ...

    def identity(self) -> str:
        return "source"

    def checks(self) -> list[object]:
        return []


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    """Leave the registry as it was."""
    known = {made.identity for made in all_projections()}
    yield
    for made in all_projections():
        if made.identity not in known:
            forget(made)


def declare(name: Any = "subject", **options: Any) -> Callable[..., Any]:
    """Declare a projection with the required options, and return its handler."""

    @projection(name, **{"source": Source(), "parallelism": 2, **options})
    def handler(event: object, meta: object) -> Skip:
        return Skip()

    return handler


def refusal(**options: Any) -> str:
    """Return the message that a declaration with `options` is refused with."""
    with pytest.raises(ConfigurationError) as caught:
        declare(**options)
    return str(caught.value)


# --- declaring ---------------------------------------------------------------------------------------------------


def test_the_decorated_function_stays_a_function() -> None:
    """Users unit-test a handler by calling it."""
    handler = declare()

    assert handler(object(), None) == Skip()


def test_only_source_and_parallelism_are_required() -> None:
    """Everything else has the default that the reference names."""
    made = find(declare())

    assert made.identity == Identity("subject", 1)
    assert (made.on_failure, made.retry, made.lag_interval) == ("continue", RetryPolicy(), 5.0)
    assert (made.partition_by, made.event_types, made.models) == (None, None, ())


@pytest.mark.parametrize("missing", ["source", "parallelism"])
def test_a_required_option_has_no_silent_default(missing: str) -> None:
    """How many connections a projection opens is a decision that nobody takes for the user."""
    options = {"source": Source(), "parallelism": 2}
    del options[missing]

    with pytest.raises(ConfigurationError, match=f"'{missing}' is required and has no default"):
        projection("subject", **options)


def test_a_bare_decorator_is_refused() -> None:
    """``@projection`` without a name says what its first argument is."""
    with pytest.raises(ConfigurationError, match="the first argument is the projection's name"):
        projection(lambda event, meta: Skip())


@pytest.mark.parametrize("name", ["", None, 5])
def test_a_name_is_a_string(name: object) -> None:
    """The name is a row's key."""
    assert "a string, not" in refusal(name=name)


def test_a_name_fits_its_column() -> None:
    """A name that the tables cannot hold is refused when it is declared, not at the first commit."""
    assert "at most 255 characters, this one has 256" in refusal(name="x" * 256)


def test_a_misspelt_option_is_answered_with_the_closest_one() -> None:
    """An unknown option never keeps a default silently."""
    assert "unknown option 'paralelism'; did you mean 'parallelism'" in refusal(paralelism=4)


@pytest.mark.parametrize(
    ("option", "answer"),
    [
        ("consistency", "wait_for"),
        ("application", "source=TableSource(Event)"),
        ("repo", "OrmTarget(using='alias')"),
        ("schema_prefix", "search_path"),
    ],
)
def test_options_of_other_libraries_say_where_the_thing_went(option: str, answer: str) -> None:
    """Somebody who migrates gets a pointer instead of a list of options."""
    message = refusal(**{option: "x"})

    assert answer in message
    assert "did you mean" not in message


@pytest.mark.parametrize(
    ("option", "value", "answer"),
    [
        ("version", 0, "at least 1, not 0"),
        ("version", "2", "at least 1, not '2'"),
        ("version", True, "at least 1, not True"),
        ("parallelism", 0, "at least 1, not 0"),
        ("parallelism", 2.0, "at least 1, not 2.0"),
        ("batch_size", -5, "at least 1, not -5"),
        ("lag_interval", -1, "seconds, 0 or more, not -1"),
        ("lag_interval", "5", "seconds, 0 or more, not '5'"),
        ("on_failure", "skip", "'continue', 'park', 'halt', not 'skip'"),
        ("partition_by", "customer_id", "a callable Event -> str, or SERIAL"),
        ("event_types", "OrderPlaced", "a list of event type names or classes"),
        ("event_types", [], "a list of event type names or classes"),
        ("models", "OrderRow", "a list of model classes"),
        ("retry", {"attempts": 0}, "attempts must be a whole number"),
        ("retry", {"attempts": 9}, "9 attempts need 8 waits between them"),
        ("source", Source, "it is a class, not an instance"),
        ("source", object(), "it has no subscribe, identity()"),
        ("target", "default", "it has no open, valid_result, classify()"),
    ],
)
def test_a_wrong_value_is_refused_with_the_accepted_ones(option: str, value: object, answer: str) -> None:
    """The message names the projection, the option, the value and what would be right."""
    message = refusal(**{option: value})

    assert message.startswith("@projection('subject')")
    assert option in message
    assert answer in message


def test_types_may_be_given_as_classes() -> None:
    """A list of event classes is a list of their names."""

    class Placed: ...

    assert find(declare(event_types=[Placed, "Shipped"])).event_types == {Placed.__qualname__, "Shipped"}


# --- handlers ----------------------------------------------------------------------------------------------------


def test_a_class_with_a_handle_method_is_instantiated_once() -> None:
    """The threads share one instance, made when the class is declared."""
    made = []

    @projection("subject", source=Source(), parallelism=2)
    class Handler:
        def __init__(self) -> None:
            made.append(self)

        def handle(self, event: object, meta: object) -> Skip:
            return Skip()

    assert find(Handler).handler(None, None) == Skip()  # type: ignore[arg-type]  # the handler ignores both
    assert len(made) == 1


def decorate(handler: Any) -> str:
    """Return the message that `handler` is refused with."""
    with pytest.raises(ConfigurationError) as caught:
        projection("subject", source=Source(), parallelism=2)(handler)
    return str(caught.value)


@pytest.mark.case("B20")
def test_an_async_handler_is_refused() -> None:
    """A coroutine cannot run inside a database transaction."""

    async def handler(event: object, meta: object) -> None: ...

    async def generator(event: object, meta: object) -> Any:
        yield Skip()

    class Handler:
        async def handle(self, event: object, meta: object) -> None: ...

    for wrong in (handler, generator, Handler, functools.partial(handler)):
        assert "write a plain def" in decorate(wrong)


def test_a_handler_takes_event_and_meta() -> None:
    """A function that could never be called is refused when it is declared."""
    assert "must accept (event, meta)" in decorate(lambda event: Skip())
    assert "must accept (event, meta)" in decorate(lambda event, meta, extra: Skip())


def test_a_class_without_handle_is_refused() -> None:
    """The message names both accepted forms."""

    class Handler: ...

    assert "a class with handle(self, event, meta)" in decorate(Handler)


def test_optional_parameters_are_fine() -> None:
    """Whatever can be called with two arguments may handle."""

    @projection("subject", source=Source(), parallelism=1)
    def handler(*args: object, **kwargs: object) -> Skip:
        return Skip()

    assert find("subject").handler(None, None) == Skip()  # type: ignore[arg-type]  # the handler ignores both


# --- finding -----------------------------------------------------------------------------------------------------


def test_a_projection_is_found_by_function_name_or_identity() -> None:
    """The function, a name (version 1), (name, version), and a projection itself mean the same one."""
    handler = declare()

    assert find(handler) is find("subject") is find(("subject", 1)) is find(find("subject"))


def test_a_name_alone_means_version_one() -> None:
    """Where only version 2 exists the answer says so, instead of guessing."""
    declare(version=2)

    with pytest.raises(UnknownProjection, match=r"no projection 'subject' version 1; 'subject' has version\(s\) 2"):
        find("subject")


def test_an_unknown_name_is_answered_with_the_closest_one() -> None:
    """A misspelt name names the one that was probably meant."""
    declare("subject-of-this-test")

    with pytest.raises(UnknownProjection, match="did you mean 'subject-of-this-test'"):
        find("subject-of-that-test")


@pytest.mark.parametrize("wrong", [5, None, ("a", 1, 2), lambda: None])
def test_other_things_are_no_projections(wrong: object) -> None:
    """The message says what can be given."""
    with pytest.raises(UnknownProjection, match=r"give the decorated function, a name, or \(name, version\)"):
        find(wrong)


def test_versions_are_siblings() -> None:
    """(name, version) is the identity: both versions stay registered, in order."""
    declare(version=2)
    declare(version=1)

    versions = [made.version for made in all_projections() if made.name == "subject"]

    assert versions == [1, 2]


def handler_of_the_module(event: object, meta: object) -> Skip:
    """Handle nothing; declared twice below."""
    return Skip()


@pytest.mark.case("D9")
def test_declaring_the_same_handler_again_replaces_it() -> None:
    """A module that is imported twice makes no duplicate."""
    for parallelism in (1, 2):
        projection("subject", source=Source(), parallelism=parallelism)(handler_of_the_module)

    assert find("subject").parallelism == 2
    assert not [duplicate for duplicate in duplicate_identities() if duplicate[0].name == "subject"]


def test_two_handlers_under_one_identity_are_remembered() -> None:
    """The second does not win silently: the system check names both places, and where they are."""
    projection("subject", source=Source(), parallelism=1)(handler_of_the_module)
    declare()

    (duplicate,) = [found for found in duplicate_identities() if found[0].name == "subject"]

    assert duplicate[0] == Identity("subject", 1)
    assert "handler_of_the_module (line " in duplicate[1]
    assert "declare.<locals>.handler (line " in duplicate[2]


def test_a_copied_handler_that_kept_its_name_is_another_handler() -> None:
    """Copy, paste, and forget to rename: Python keeps the last one, the check must still see two."""

    def first() -> Any:
        def handler(event: object, meta: object) -> Skip:
            return Skip()

        return handler

    def second() -> Any:
        def handler(event: object, meta: object) -> Skip:
            return Skip()

        return handler

    one, two = first(), second()
    two.__qualname__ = one.__qualname__
    for handler in (one, two):
        projection("subject", source=Source(), parallelism=1)(handler)

    assert [found[0].name for found in duplicate_identities()].count("subject") == 1


def test_forgetting_takes_the_duplicates_along() -> None:
    """A test that declares wrongly on purpose leaves nothing behind for ``check``."""
    projection("subject", source=Source(), parallelism=1)(handler_of_the_module)
    declare()

    forget("subject")

    assert not [found for found in duplicate_identities() if found[0].name == "subject"]
    assert "subject" not in {made.name for made in all_projections()}


# --- overriding --------------------------------------------------------------------------------------------------


def test_what_is_no_identity_can_be_overridden() -> None:
    """A copy with other options; the registered projection stays as it was declared."""
    made = find(declare())

    changed = made.override(parallelism=32, retry=False, on_failure="park", batch_size=7, lag_interval=0)

    assert (changed.parallelism, changed.retry.attempts, changed.on_failure) == (32, 1, "park")
    assert (changed.batch_size, changed.lag_interval) == (7, 0.0)
    assert made.parallelism == 2


@pytest.mark.parametrize("option", ["name", "version", "source", "target", "partition_by", "event_types", "models"])
def test_the_identity_cannot_be_overridden(option: str) -> None:
    """What is recorded under (name, version) needs a new version instead."""
    with pytest.raises(ConfigurationError, match="part of the projection's identity"):
        find(declare()).override(**{option: 1})


def test_overrides_are_checked_like_declarations() -> None:
    """Neither a wrong value nor an unknown option slips in at run time."""
    made = find(declare())

    with pytest.raises(ConfigurationError, match="at least 1, not 0"):
        made.override(parallelism=0)
    with pytest.raises(ConfigurationError, match="unknown; did you mean 'batch_size'"):
        made.override(batchsize=4)


def test_global_order_has_one_lane() -> None:
    """``SERIAL`` keeps everything in one lane, whatever `parallelism` says."""
    made = find(declare(partition_by=SERIAL, parallelism=8))

    assert (made.lanes, made.partition_by_name) == (1, "SERIAL")


def test_the_ordering_key_is_recorded_by_name() -> None:
    """The recorded text tells two key functions apart, so that a change under one version can be refused."""

    def by_customer(event: object) -> str:
        return ""

    assert find(declare()).partition_by_name == "stream_id"
    assert find(declare(partition_by=by_customer)).partition_by_name.endswith("by_customer")
