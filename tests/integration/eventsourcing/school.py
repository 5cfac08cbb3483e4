"""A school for dogs: the short way of declaring events, a class that was changed once, and events named by strings."""

from __future__ import annotations

from uuid import UUID

from eventsourcing.application import Application
from eventsourcing.domain import Aggregate, event

__all__ = ["Dog", "School"]


class Dog(Aggregate):
    @event("Enrolled")
    def __init__(self, name: str) -> None:
        self.name = name
        self.tricks: list[str] = []

    @event("TrickLearned")
    def learn(self, trick: str) -> None:
        self.tricks.append(trick)


class School(Application):
    def enrol(self, name: str) -> UUID:
        dog = Dog(name)
        self.save(dog)
        return dog.id

    def teach(self, dog_id: UUID, trick: str) -> int:
        dog = self.repository.get(dog_id)
        dog.learn(trick)
        return self.save(dog)[-1].notification.id
