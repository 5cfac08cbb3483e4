"""The users' test kit.

* :func:`drain` runs a projection in the calling thread on the test's own connection: works inside a ``TestCase`` and
  inside ``django_db`` tests.
* :class:`MemorySource` and :class:`MemoryTarget` stand in for an event store and a read model.
* ``scriba.testing.sources.SourceContract`` is what every source must pass: subclass it for a source of your own.
"""

from scriba.testing.inline import Drained, drain
from scriba.testing.memory import MemorySource, MemoryTarget

__all__ = ["Drained", "MemorySource", "MemoryTarget", "drain"]
