"""``manage.py demo`` and what its user does next: it runs, it verifies, and its verification can say no."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from example_project.embedded import EmbeddedPostgres
from tests.acceptance.conftest import Shop
from tests.support.processes import REPOSITORY

LOOK_AT_THE_ADMIN = """
from django.test import Client
from scriba.models import DeadLetter
client = Client()
assert client.login(username="admin", password="admin")
pages = ["/admin/", "/admin/scriba/deadletter/", "/admin/shop/storedevent/", "/admin/shop/orderrow/", "/admin/bank/accountbalance/"]
pages.append(f"/admin/scriba/deadletter/{DeadLetter.objects.first().pk}/change/")
for page in pages:
    answer = client.get(page)
    print(page, answer.status_code)
"""


def test_the_demo_settles_and_verifies_itself_and_may_be_run_again(empty_shop: Shop) -> None:
    """Writers append while projections run; in the end the read models are what the events say, each time."""
    first = empty_shop.manage("demo", "--events", "2000")
    second = empty_shop.manage("demo", "--events", "500", "--writers", "2", "--no-latency")

    assert "appended 2,000 events from 4 writers" in first
    for said in (first, second):
        assert "verified." in said
        assert "WRONG" not in said
        assert "Traceback" not in said, "poison is expected: no reason to alarm anybody"
        assert re.search(r"[\d,]+ events/s through orders and customers", said)
        assert re.search(r"orders:1\s+running", said)
        assert "login admin, password admin" in said
    assert re.search(r"after \d+ ms when the projection was idle, \d+ ms when .* notified, \d+ ms while", first)
    assert "in the read model after" not in second


def test_what_the_demo_claims_can_be_counted_with_sql(shop_after_demo: Shop) -> None:
    """Every event is settled one way by each projection; ids were burnt, and there was poison."""
    shop = shop_after_demo
    events = shop.count("SELECT count(*) FROM shop_storedevent")
    assert events == 1000
    assert shop.settled("orders") == events
    assert shop.settled("customers") == shop.count("SELECT count(*) FROM shop_storedevent WHERE type = 'OrderPlaced'")
    assert shop.count("SELECT max(id) FROM shop_storedevent") > events
    letters = shop.count("SELECT count(*) FROM scriba_dead_letters WHERE projection_name = 'orders'")
    placed = shop.count("SELECT count(*) FROM shop_storedevent WHERE type = 'OrderPlaced'")
    assert letters > 0
    assert shop.count("SELECT count(*) FROM shop_orderrow") == placed - letters
    latest = """
        SELECT count(*) FROM shop_customerrow AS row WHERE last_order_id <> (
            SELECT data ->> 'order_id' FROM shop_storedevent WHERE type = 'OrderPlaced' AND data ->> 'customer_id' = row.id
            AND data ->> 'amount' NOT IN ('twelve', '123456789012.34') ORDER BY id DESC LIMIT 1)"""
    assert shop.count(latest) == 0


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (
            "UPDATE shop_orderrow SET carrier = 'nobody' WHERE id = (SELECT min(id) FROM shop_orderrow)",
            "orders: the read model",
        ),
        ("DELETE FROM shop_customerrow WHERE id = (SELECT min(id) FROM shop_customerrow)", "customers: the read model"),
        ("UPDATE bank_accountbalance SET balance = balance + 1", "balances: the read model"),
        ("UPDATE scriba_lanes SET applied = applied + 1", "delivered == applied"),
        ("DELETE FROM scriba_dead_letters WHERE projection_name = 'customers'", "customers: exactly the poison"),
    ],
)
def test_the_verification_finds_one_wrong_row(shop_after_demo: Shop, damage: str, what: str) -> None:
    """A verification that cannot fail proves nothing: each damage is found, and is a failure."""
    shop_after_demo.execute(damage)

    said = shop_after_demo.manage("demo", "--verify-only", succeed=False)

    assert re.search(rf"WRONG .*{re.escape(what)}", said)
    assert "verified." not in said


def test_the_admin_shows_what_the_demo_left(shop_after_demo: Shop) -> None:
    """The printed login opens the admin; events, read models and dead letters are there to be read."""
    said = shop_after_demo.manage("shell", "-c", LOOK_AT_THE_ADMIN)

    assert len(re.findall(r"^/admin/.* 200$", said, re.MULTILINE)) == 6, said


def test_a_halted_projection_ends_the_demo_with_the_cause(shop: Shop) -> None:
    """A schema that does not fit is no reason to wait for ten minutes."""
    shop.execute("ALTER TABLE shop_orderrow DROP COLUMN carrier")

    said = shop.manage("demo", "--events", "400", "--no-latency", succeed=False)

    assert re.search(r"orders.*halted.*carrier", said, re.DOTALL)
    assert "CommandError" in said


def test_a_database_that_is_away_is_one_message(shop: Shop) -> None:
    """The message says what happened and where the name of the database comes from."""
    away = Shop(shop.url.replace("port=", "port=1"))

    said = away.manage("demo", succeed=False)

    assert "cannot be reached" in said
    assert "DATABASE_URL" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [["--events", "0"], ["--writers", "-1"], ["--events", "many"]])
def test_what_makes_no_sense_is_refused(shop: Shop, arguments: list[str]) -> None:
    """Wrong usage is a message, not a traceback."""
    said = shop.manage("demo", *arguments, succeed=False)

    assert arguments[0] in said
    assert "Traceback" not in said


def test_without_a_database_url_the_demo_brings_its_own_server(tmp_path: Path) -> None:
    """Nothing but Python: the command starts a PostgreSQL, and it stays for the next command."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("DJANGO_", "SCRIBA_", "DATABASE_"))
    }
    environment = {**clean, "SCRIBA_DEMO_FOLDER": str(tmp_path / "pg")}
    server = EmbeddedPostgres(tmp_path / "pg")
    try:
        done = subprocess.run(
            [sys.executable, "manage.py", "demo", "--events", "300", "--no-latency"],
            cwd=REPOSITORY,
            env=environment,
            text=True,
            capture_output=True,
            timeout=120,
            check=False,
        )

        assert done.returncode == 0, done.stdout + done.stderr
        assert "verified." in done.stdout
        assert server.is_running()
    finally:
        server.remove()
