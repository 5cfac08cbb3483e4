"""A projection under a name of its own, its rows as a process would leave them, and commands run in the test."""

from __future__ import annotations

import io
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.core.management import CommandError, call_command

from scriba import OrmTarget, Skip, projection
from scriba.models import DeadLetter, Lane, ProjectionState, Segment
from scriba.registry import Projection, find, forget
from scriba.testing import MemorySource


class Terminal(io.StringIO):
    """An output that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Shell:
    """Runs commands and keeps what they print."""

    def __init__(self) -> None:
        self.out = self.err = ""

    def __call__(self, command: str, *arguments: str, terminal: bool = False) -> str:
        """Run a command that has to succeed; return its output."""
        out, err = (Terminal() if terminal else io.StringIO()), io.StringIO()
        try:
            call_command(command, *arguments, stdout=out, stderr=err)
        finally:
            self.out, self.err = out.getvalue(), err.getvalue()
        return self.out

    def refused(self, command: str, *arguments: str) -> tuple[int, str]:
        """Run a command that has to fail; return its exit code and its message."""
        with pytest.raises(CommandError) as caught:
            self(command, *arguments)
        return caught.value.returncode, str(caught.value)


class Subject:
    """A declared projection and its rows."""

    def __init__(self, made: Projection) -> None:
        self.made = made
        self.name, self.version = made.identity
        self.keys = {"projection_name": self.name, "projection_version": self.version}

    def state(self, **columns: Any) -> ProjectionState:
        return ProjectionState.objects.update_or_create(**self.keys, defaults=columns)[0]

    def segment(self, *, live: bool = True, **columns: Any) -> Segment:
        """Make the segment's row, by default as a running owner leaves it."""
        self.state()
        until = datetime.now(UTC) + timedelta(minutes=1 if live else -1)
        defaults = {
            "owner": "shop-1:42:abc",
            "status": "running",
            "lease_expires_at": until,
            "watermark": 90,
            "head": 100,
        }
        return Segment.objects.update_or_create(**self.keys, defaults=defaults | columns)[0]

    def lanes(self, *counts: tuple[int, int, int]) -> None:
        segment = Segment.objects.get(**self.keys)
        for number, (applied, skipped, dead) in enumerate(counts):
            Lane.objects.create(segment=segment, lane=number, applied=applied, skipped=skipped, dead_lettered=dead)

    def letter(self, position: int, **columns: Any) -> DeadLetter:
        defaults = {
            "stream_id": "order-1",
            "event_type": "OrderPlaced",
            "error_kind": "KeyError",
            "error_message": "'id'",
        }
        return DeadLetter.objects.create(**self.keys, position=position, **defaults | columns)


@pytest.fixture
def shell(db: None) -> Shell:
    return Shell()


@pytest.fixture
def subject(db: None, scratch_name: str) -> Iterator[Subject]:
    made = declare(scratch_name)
    yield Subject(made)
    forget(made)


@pytest.fixture
def sibling(subject: Subject) -> Iterator[Subject]:
    """Version 2 of the same name."""
    made = declare(subject.name, version=2)
    yield Subject(made)
    forget(made)


def declare(name: str, **options: Any) -> Projection:
    @projection(name, **{"source": MemorySource(), "target": OrmTarget(), "parallelism": 2, **options})
    def handler(event: object, meta: object) -> Skip:
        return Skip()

    return find((name, options.get("version", 1)))
