"""Whatever is asked of a projection, and from wherever, is in the records: who, what, of what."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import call_command
from django.test import Client

import scriba
from scriba.management.base import operator
from scriba.models import Audit, DeadLetter, ProjectionState
from scriba.panel.live import DONE
from scriba.protocols import Identity
from scriba.registry import Projection, find
from scriba.registry import forget as undeclare
from scriba.testing import MemorySource

LETTERS = "/admin/scriba/deadletter/"
ORPHAN = Identity("an-orphan", 1)
OLD = datetime(2020, 1, 1, tzinfo=UTC)

pytestmark = pytest.mark.django_db(transaction=True)


class Desk:
    """Asks one thing of a declared projection, in one of three ways."""

    def __init__(self, made: Projection, admin: Client) -> None:
        self._made, self._name, self._admin = made, made.name, admin

    # --- from code ----------------------------------------------------------------------------------------

    def code(self, verb: str) -> None:
        acts: dict[str, Callable[[], Any]] = {
            "replay": lambda: scriba.replay(self._letters.get(), by="ann"),
            "discard": lambda: scriba.discard(self._letters.get(), by="ann"),
            "replay all": lambda: scriba.replay_all(self._letters, by="ann"),
            "discard all": lambda: scriba.discard_all(self._letters, by="ann"),
            "purge": lambda: scriba.purge_resolved(self._letters, older_than=timedelta(days=1), by="ann"),
            "forget": lambda: scriba.forget(ORPHAN, by="ann"),
            "start in the background": self._start_in_the_background,
        }
        acts.get(verb, lambda: getattr(scriba, verb)(self._made, by="ann"))()

    def _start_in_the_background(self) -> None:
        with scriba.start_projection(self._made, by="ann"):
            pass

    # --- from the command line ----------------------------------------------------------------------------

    def command(self, verb: str) -> None:
        letters = ("scriba_dead_letters", verb.split(maxsplit=1)[0])
        all_of_them = ("--projection", self._name, "--no-input")
        acts: dict[str, tuple[str, ...]] = {
            "reset": ("scriba_reset", self._name, "--no-input"),
            "forget": ("scriba_forget", str(ORPHAN), "--no-input"),
            "replay": (*letters, "{id}", "--wait", "0"),
            "discard": (*letters, "{id}", "--wait", "0"),
            "replay all": (*letters, *all_of_them, "--wait", "0"),
            "discard all": (*letters, *all_of_them, "--wait", "0"),
            "purge": (*letters, *all_of_them, "--older-than", "1d"),
            "start in the foreground": ("run_projections", self._name, "--start", "--until-caught-up", "--no-progress"),
        }
        command, *arguments = acts.get(verb, (f"scriba_{verb}", self._name))
        found = [argument.format(id=getattr(self._letters.first(), "pk", "")) for argument in arguments]
        call_command(command, *found, stdout=io.StringIO(), stderr=io.StringIO())

    # --- from the admin -----------------------------------------------------------------------------------

    def admin(self, verb: str) -> None:
        wish = verb.split(maxsplit=1)[0]
        if verb in {"replay", "discard"}:
            self._post(f"{LETTERS}{self._letters.get().pk}/{verb}/", sure="yes")
        elif verb in {"replay all", "discard all"}:
            selected = {"_selected_action": self._letters.get().pk}
            self._post(LETTERS, action=f"{wish}_selected", sure="yes", **selected)
        elif verb == "purge":
            self._post(f"{LETTERS}purge/", before=datetime.now(UTC).isoformat())
        else:
            name, version = ORPHAN if verb == "forget" else self._made.identity
            path = "/admin/scriba/projectionstate/live/act/"
            self._post(path, action=verb, alias="default", name=name, version=version, sure="yes")

    def _post(self, path: str, **values: Any) -> None:
        assert self._admin.post(path, values).status_code == 302

    @property
    def _letters(self) -> Any:
        return DeadLetter.objects.filter(projection_name=self._name)


WHO = {"code": "ann", "command": operator(), "admin": "admin (admin)"}
VERBS = ["start", "pause", "resume", "stop", "reset", "replay", "replay all", "discard", "discard all", "purge"]
ACTS = [
    *((way, verb) for way in WHO for verb in VERBS),
    ("code", "start in the background"), ("command", "start in the foreground"),
    *((way, "forget") for way in WHO),
]  # fmt: skip


@pytest.fixture
def desk(scratch_name: str, admin_client: Client) -> Iterator[Desk]:
    @scriba.projection(scratch_name, source=MemorySource(), target=scriba.OrmTarget(), parallelism=1)
    def handler(event: object, meta: object) -> scriba.Skip:
        return scriba.Skip()

    yield Desk(find(scratch_name), admin_client)
    undeclare(handler)


@pytest.mark.case("D1")
@pytest.mark.parametrize(("way", "verb"), ACTS)
def test_every_act_is_recorded_with_who_asked(desk: Desk, scratch_name: str, way: str, verb: str) -> None:
    """From code, from the command line, from the admin: one entry, written together with the act."""
    prepare(scratch_name, verb)

    getattr(desk, way)(verb)

    of = ORPHAN.name if verb == "forget" else scratch_name
    (entry,) = Audit.objects.filter(projection_name=of)
    assert (entry.action, entry.actor) == (verb.split(maxsplit=1)[0], WHO[way])
    assert datetime.now(UTC) - entry.happened_at < timedelta(minutes=1)


def prepare(name: str, verb: str) -> None:
    """Write the rows without which `verb` would be refused."""
    wish = {"start": "stopped", "resume": "paused"}.get(verb, "running")
    ProjectionState.objects.create(projection_name=name, projection_version=1, wish=wish)
    ended = {"status": "replayed", "resolved_at": OLD} if verb == "purge" else {}
    if verb.split(maxsplit=1)[0] in {"replay", "discard", "purge"}:
        DeadLetter.objects.create(projection_name=name, projection_version=1, position=3, **ended)
    if verb == "forget":
        ProjectionState.objects.create(projection_name=ORPHAN.name, projection_version=ORPHAN.version)


def test_the_page_has_no_button_that_is_not_looked_at_here() -> None:
    """A new act belongs into the list above."""
    assert set(DONE) <= {verb for way, verb in ACTS if way == "admin"}
