"""MIGRATION.md names nothing that is not there, and leaves out nothing that a team asks about."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

import scriba
from scriba.registry import _OPTIONS
from scriba.sources import TableSource, decoding
from scriba.sources.building import PayloadMismatch
from scriba.sources.commanded import CommandedSource
from scriba.sources.erlang_terms import TermError
from scriba.sources.eventsourcing import EventSourcingSource

ROOT = Path(__file__).resolve().parents[2]
GUIDE = (ROOT / "MIGRATION.md").read_text()
HOW_TO = (ROOT / "docs" / "howto" / "commanded.md").read_text()


@pytest.mark.parametrize("page", [GUIDE, HOW_TO], ids=["MIGRATION.md", "commanded.md"])
@pytest.mark.parametrize("source", [CommandedSource, EventSourcingSource, TableSource])
def test_options_of_sources_exist(page: str, source: type) -> None:
    """Every keyword in a call of a source is one of its options."""
    calls = re.findall(rf"(?<!\w){source.__name__}\(((?:[^()]|\([^()]*\))*)\)", page)
    named = {name for call in calls for name in re.findall(r"(\w+)=", call)}

    assert named <= set(inspect.signature(source).parameters)


@pytest.mark.parametrize("page", [GUIDE, HOW_TO], ids=["MIGRATION.md", "commanded.md"])
def test_commands_exist(page: str) -> None:
    """Every command that a page tells to run is there."""
    known = {path.stem for path in (ROOT / "scriba/management/commands").glob("[a-z]*.py")}
    named = set(re.findall(r"manage\.py (\w+)", page)) - {"check", "migrate"}

    assert named
    assert named <= known


@pytest.mark.parametrize("page", [GUIDE, HOW_TO], ids=["MIGRATION.md", "commanded.md"])
def test_python_examples_compile(page: str) -> None:
    """Examples are Python."""
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        ends_with_decorator = block.lstrip().startswith("@") and "def " not in block
        compile(f"{block}\ndef handler(): ..." if ends_with_decorator else block, "example", "exec")


def test_error_kinds_exist() -> None:
    """The table of mistakes names exceptions that are raised."""
    kinds = set(re.findall(r"`decode:(\w+)`", GUIDE))

    assert kinds == {
        "JSONDecodeError", "UnicodeDecodeError", TermError.__name__, PayloadMismatch.__name__,
        decoding.UnknownEventType.__name__,
    }  # fmt: skip


def test_words_of_the_decorator_and_results_exist() -> None:
    """Options of `@projection` and names of results are spelt as in the code."""
    for option in ("parallelism", "partition_by", "on_failure", "batch_size", "version", "models", "target", "source"):
        assert option in _OPTIONS
        assert option in GUIDE
    for name in set(
        re.findall(r"`(Insert|Update|Delete|Upsert|Done|Skip|Fail|SERIAL|RetryPolicy|RetryAfter)\b", GUIDE)
    ):
        assert name in scriba.__all__


@pytest.mark.parametrize(
    "topic",
    [
        "rebuild?", "Cut over in place", "Reuse the old subscription", "Seeding cursors", "When you want a rebuild",
        "What happens to `projection_versions`", "`project` becomes a function", "Say `Skip()`", "## Options", "`Ecto.Multi`",
        "## Metadata", "after_update/3", "error/3", "schema_prefix/1,2", "consistency: :strong", "runs in parallel",
        "is passed, not blocking", "`parallelism` has no default", "Which mistake shows up as what", "## Checklist",
        "From `eventsourcing`", "From a loop of your own", "From Django signals",
    ],
)  # fmt: skip
def test_every_question_has_its_section(topic: str) -> None:
    """Whatever a team that moves has to decide is there."""
    assert topic in GUIDE
