"""Every log record of Scriba carries fields, so that a collector finds all lines of one projection."""

from __future__ import annotations

import ast
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from scriba.log_fields import about
from scriba.protocols import Identity

ROOT = Path(__file__).resolve().parents[2]
LEVELS = {"debug", "info", "warning", "error", "exception", "critical", "log"}
#: What every record has by itself: an extra of such a name would be an error at run time.
RESERVED = set(logging.makeLogRecord({}).__dict__) | {"message", "asctime"}


def log_calls(tree: ast.AST) -> Iterator[tuple[ast.Call, ast.AST]]:
    """Each call of a method of ``logger``, with the function around it."""
    for scope in ast.walk(tree):
        if isinstance(scope, ast.FunctionDef):
            for node in ast.walk(scope):
                if isinstance(node, ast.Call) and is_log_method(node.func):
                    yield node, scope


def is_log_method(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr in LEVELS
        and isinstance(node.value, ast.Name)
        and node.value.id == "logger"
    )


def fields_of(call: ast.Call, scope: ast.AST) -> ast.Call | None:
    """Return the ``about(…)`` of a log call: given as it is, or by the name ``extra`` that the function assigns once."""
    given = next((keyword.value for keyword in call.keywords if keyword.arg == "extra"), None)
    if isinstance(given, ast.Name):
        assigned = [
            node.value
            for node in ast.walk(scope)
            if isinstance(node, ast.Assign) and [ast.unparse(target) for target in node.targets] == [given.id]
        ]
        given = assigned[0] if assigned else None
    is_about = isinstance(given, ast.Call) and isinstance(given.func, ast.Name) and given.func.id == "about"
    return given if is_about and isinstance(given, ast.Call) else None


MODULES = [
    path
    for path in sorted((ROOT / "scriba").rglob("*.py"))
    if any(map(is_log_method, ast.walk(ast.parse(path.read_text()))))
]


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT / "scriba")))
def test_every_log_call_says_what_it_is_about(path: Path) -> None:
    """One mechanism for all: ``extra=about(identity, …)``, with names that a record does not have already."""
    tree = ast.parse(path.read_text())
    calls = list(log_calls(tree))
    methods = [node for node in ast.walk(tree) if is_log_method(node)]

    assert {id(call.func) for call, _ in calls} == {id(method) for method in methods}, "a method that is not called"
    for call, scope in calls:
        fields = fields_of(call, scope)
        assert fields is not None, f"line {call.lineno}: no extra=about(…)"
        assert not {keyword.arg for keyword in fields.keywords} & RESERVED, f"line {call.lineno}: a reserved name"


def test_what_is_not_known_is_left_out() -> None:
    """A field that is None would look like a value."""
    fields = about(Identity("orders", 2), lane=0, position=None, event_id="e-1")

    assert fields == {"projection": "orders", "version": 2, "lane": 0, "event_id": "e-1"}
    assert about(None, pid=7) == {"pid": 7}


def test_a_record_with_fields_is_written(caplog: pytest.LogCaptureFixture) -> None:
    """They are attributes of the record, where formatters and collectors look for them."""
    logging.getLogger("scriba").warning("%s: gone", "orders:2", extra=about(Identity("orders", 2), position=7))

    (record,) = caplog.records
    assert (record.projection, record.version, record.position) == ("orders", 2, 7)  # type: ignore[attr-defined]
