"""The reference is complete: whatever users can name has its line, and no line names what is not there."""

from __future__ import annotations

import argparse
import inspect
import re
from dataclasses import fields
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import load_command_class

import scriba
from scriba import signals
from scriba.conf import Settings
from scriba.event import EventMeta
from scriba.failure import TABLE
from scriba.info import Info
from scriba.management.overview import JSON_KEYS
from scriba.protocols import FailureKind, Status
from scriba.registry import _OPTIONS
from scriba.sources import TableSource
from scriba.sources.commanded import CommandedSource
from scriba.sources.eventsourcing import EventSourcingSource
from scriba.sources.eventsourcing_tables import DjangoEventSourcingSource

ROOT = Path(__file__).resolve().parents[2]
REFERENCE = ROOT / "docs" / "reference"
COMMANDS = sorted(path.stem for path in (ROOT / "scriba/management/commands").glob("[a-z]*.py"))


def page(name: str) -> str:
    return (REFERENCE / f"{name}.md").read_text()


def section(name: str, heading: str) -> str:
    """Return the part of a page below ``## `heading```, up to the next one."""
    text = page(name)
    start = text.index(f"## `{heading}`\n")
    end = text.find("\n## ", start + 3)
    return text[start : end if end > 0 else len(text)]


def first_cells(text: str) -> list[str]:
    """Return every word in backticks of the first column of every table."""
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    return [word for row in rows for word in re.findall(r"`([^`]+)`", row.split(" | ")[0])]


def parsers(command: str) -> dict[str, argparse.ArgumentParser]:
    """Return a command's parser, and those of its subcommands by name."""
    whole = load_command_class("scriba", command).create_parser("manage.py", command)
    found: dict[str, argparse.ArgumentParser] = {"": whole}
    for action in whole._actions:
        if isinstance(action, argparse._SubParsersAction):
            found |= action.choices
    return found


def own_options(parser: argparse.ArgumentParser) -> set[str]:
    """Return a parser's long options, without those that every Django command has and without second spellings."""
    django = {
        "--help", "--version", "--verbosity", "--settings", "--pythonpath", "--traceback", "--no-color",
        "--force-color", "--skip-checks",
    }  # fmt: skip
    return {action.option_strings[0] for action in parser._actions if action.option_strings} - django - {"-h", "-v"}


# --- names -------------------------------------------------------------------------------------------------------


def test_every_exported_name_is_in_the_api_reference() -> None:
    """``__all__`` and the page name the same things."""
    terms = [line for line in page("api").splitlines() if line.startswith("`")]
    named = {re.split(r"\W", word)[0] for line in terms for word in re.findall(r"`([^`]+)`", line)}

    assert named == set(scriba.__all__)


def test_every_exported_name_is_there() -> None:
    """``from scriba import *`` works, and the list is sorted and complete."""
    assert all(hasattr(scriba, name) for name in scriba.__all__)
    assert len(set(scriba.__all__)) == len(scriba.__all__)


def test_every_option_of_the_decorator_is_documented() -> None:
    """The table of options is the list that the decorator accepts."""
    options = page("projection").split("## What a handler gets")[0]

    assert set(first_cells(options)) == set(_OPTIONS)


SOURCES = [TableSource, CommandedSource, EventSourcingSource, DjangoEventSourcingSource]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_option_of_a_source_is_documented(source: type) -> None:
    """The table of options is the signature; a default that is a text stands in it."""
    text = section("sources", source.__name__)
    parameters = inspect.signature(source).parameters

    assert set(first_cells(text)) == set(parameters)
    for row in (line.split(" | ") for line in text.splitlines() if line.startswith("| `")):
        for name in re.findall(r"`(\w+)`", row[0]):
            if re.fullmatch(r'`".+"`', row[1]):
                assert parameters[name].default == row[1].strip('`"'), name
            else:
                assert not isinstance(parameters[name].default, str) or "as for" in row[1], name


def test_every_source_is_documented() -> None:
    """Each adapter has a section, and no section is left over."""
    assert re.findall(r"^## `(\w+)`", page("sources"), flags=re.MULTILINE) == [source.__name__ for source in SOURCES]


def test_every_field_of_meta_is_documented() -> None:
    """The table of the second argument is complete."""
    gets = page("projection").split("## What a handler gets")[1].split("## What a handler returns")[0]

    assert set(first_cells(gets)) == set(EventMeta._fields)


def test_every_field_of_info_is_documented() -> None:
    """The page names each field of `Info`."""
    (entry,) = re.findall(r"^`Info`\n: (.+?)\n\n", page("api"), flags=re.MULTILINE | re.DOTALL)

    assert set(re.findall(r"`(\w+)`", entry)) == {field.name for field in fields(Info)}


# --- settings, signals, checks, tables ---------------------------------------------------------------------------


def test_every_setting_is_documented_with_its_default() -> None:
    """Name and default of each key stand in the table."""
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page("settings"), flags=re.MULTILINE)

    assert dict(rows) == {field.name: str(field.default) for field in fields(Settings)}


def test_every_signal_is_documented_with_its_arguments() -> None:
    """The catalogue in the module and the page name the same signals and arguments."""
    catalogue = dict(re.findall(r"^(\w+) {2,}(.+)$", str(signals.__doc__), flags=re.MULTILINE))
    catalogue.pop("signal")
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]+) \|", page("signals"), flags=re.MULTILINE))

    assert set(catalogue) == set(rows) == set(signals.__all__)
    assert {name: words(text) for name, text in rows.items()} == {name: words(text) for name, text in catalogue.items()}


def words(text: str) -> list[str]:
    """Return the argument names of a row, without the remarks in brackets."""
    return re.findall(r"\w+", re.sub(r"\([^)]*\)", "", text))


def test_every_check_is_documented() -> None:
    """Each id that the code can give has its line, and no line is left over."""
    used = {
        match
        for path in (ROOT / "scriba").rglob("*.py")
        for match in re.findall(r"scriba\.[EWI]\d{3}", path.read_text())
    }

    documented = first_cells(page("checks"))

    assert set(documented) == used
    assert len(documented) == len(set(documented))


def test_check_numbers_are_unique() -> None:
    """A number is used once, whatever its level: a silenced id never silences another."""
    documented = first_cells(page("checks"))

    assert len({name[-3:] for name in documented}) == len(documented)


def test_every_table_is_documented_with_its_columns() -> None:
    """Each table has a section with exactly its columns."""
    for model in apps.get_app_config("scriba").get_models():
        columns = {field.name for field in model._meta.concrete_fields}

        assert set(first_cells(section("tables", model._meta.db_table))) == columns, model._meta.db_table


def test_every_sqlstate_is_documented_in_its_row() -> None:
    """Codes, classes and their order stand in the page as the classifier looks at them."""
    rows = re.findall(
        r"^\| ([^|]+) \| (\w+)(, bounded)? \|", page("error-kinds").split("| SQLSTATE |")[1], flags=re.MULTILINE
    )
    shown = [
        (tuple(re.findall(r"\b[0-9A-Z]{5}\b|\b\d\d\b", codes)), FailureKind(kind), bool(bounded))
        for codes, kind, bounded in rows
        if "everything else" not in codes
    ]

    assert [(set(codes), kind, bounded) for codes, kind, bounded in shown] == [
        (set(codes), kind, bounded) for codes, kind, bounded in TABLE
    ]


# --- commands ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_documented_with_its_options(command: str) -> None:
    """Each command has a section, and each of its own options stands in it; no option is left over."""
    text = section("commands", command)
    options = set().union(*(own_options(parser) for parser in parsers(command).values()))

    assert set(re.findall(r"`(--[a-z-]+)", text)) == options


def test_no_command_is_left_over() -> None:
    """The page has no section for a command that does not exist."""
    assert sorted(re.findall(r"^## `(\w+)`", page("commands"), flags=re.MULTILINE)) == COMMANDS


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_examples_and_exit_codes(command: str) -> None:
    """Exit codes and examples are part of the interface; each example is one that the command accepts."""
    parser = parsers(command)[""]
    epilog = str(parser.epilog)

    assert "examples:" in epilog
    assert "exit codes:" in epilog
    for line in examples(epilog):
        name, *arguments = line
        assert name == command
        parser.parse_args(arguments)


def examples(epilog: str) -> list[list[str]]:
    """Return the words of each example, without the explanation behind two blanks or more."""
    block = epilog.split("examples:\n")[1].split("\n\n", maxsplit=1)[0]
    lines = [re.split(r" {2,}", line.strip())[0] for line in block.splitlines()]
    return [[word.strip("'\"") for word in re.findall(r"'[^']*'|\"[^\"]*\"|\S+", line)] for line in lines]


def test_every_key_of_the_json_is_documented() -> None:
    """The keys of ``scriba_info --json`` are part of the interface."""
    (keys,) = re.findall(r"^Keys: (.+?)\.\n", page("commands"), flags=re.MULTILINE | re.DOTALL)

    assert re.findall(r"`(\w+)`", keys) == list(JSON_KEYS)


def test_every_state_is_documented() -> None:
    """The states of the reference are the states of the system."""
    (states,) = re.findall(r"^States: (.+?)\n\n", page("commands"), flags=re.MULTILINE | re.DOTALL)

    assert set(re.findall(r"`([\w ]+)`", states)) == {str(status) for status in Status}


# --- links -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))], ids=lambda path: path.name
)
def test_links_between_documents_lead_somewhere(path: Path) -> None:
    """A relative link names a file that exists."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    targets = [target.split("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in target]

    missing = [target for target in targets if target and not (path.parent / target).exists()]

    assert not missing


def test_a_decision_says_what_was_rejected() -> None:
    """A record without an alternative is no decision; and each is in the list."""
    records = sorted((ROOT / "docs/decisions").glob("0*.md"))
    index = (ROOT / "docs/decisions/index.md").read_text()

    assert records
    for record in records:
        text = record.read_text()
        assert "**Decision.**" in text
        assert "**Rejected" in text
        assert record.stem in index
