"""The events of the benchmark, and what the read model must say afterwards.

The mix is stationary, so that a slice has the mix of the whole: 41 % make a row, 49 % change one of the rows that
exist (on the stream that made it), 10 % are of no interest. What is expected is computed by PostgreSQL from the events,
by another way than any contender's: row for row, every column.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import NamedTuple

from django.db import connection

from example_project.bench.models import BenchEvent, BenchRow

ADDED, CHANGED, NOTED = "ItemAdded", "ItemChanged", "Noted"
TABLE, EVENTS = BenchRow._meta.db_table, BenchEvent._meta.db_table
STATUSES = ("open", "packed", "shipped", "returned", "closed")
PADDING = "the quick brown fox jumps over the lazy dog and then some"


class Mix(NamedTuple):
    events: int
    streams: int = 1_000
    seed: int = 7
    poison: float = 0.0  #: share of events that no handler can apply


def load(mix: Mix) -> None:
    """Replace the events by those of `mix`. Positions are 1 and up."""
    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE {EVENTS} RESTART IDENTITY")
        with cursor.copy(f"COPY {EVENTS} (stream_id, type, data) FROM STDIN") as copy:
            for row in _rows(mix):
                copy.write_row(row)
    _settle_down(EVENTS)


def clear() -> None:
    """Make the read model and everything that Scriba knows empty, as on the first day."""
    with connection.cursor() as cursor:
        cursor.execute(
            f"TRUNCATE {TABLE}, scriba_positions, scriba_dead_letters, scriba_lanes, scriba_segments, scriba_projections,"
            " scriba_audit, scriba_samples RESTART IDENTITY CASCADE"
        )
        cursor.execute("CHECKPOINT")


def wrong_rows(upto: int) -> int:
    """Return how many rows are not what the events at or below `upto` say: missing, too many, or different."""
    columns = "id, stream_id, status, amount, quantity, note, position"
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH expected AS ({_EXPECTED}), found AS (SELECT {columns} FROM {TABLE})"
            " SELECT (SELECT count(*) FROM (TABLE expected EXCEPT ALL TABLE found) AS missing)"
            " + (SELECT count(*) FROM (TABLE found EXCEPT ALL TABLE expected) AS extra)",
            {"upto": upto},
        )
        (wrong,) = cursor.fetchone()
    return int(wrong)


def count_rows() -> int:
    return BenchRow.objects.count()


#: The row as its first event made it, with what its last event says of status, amount and position.
_EXPECTED = f"""
SELECT made.item, made.stream_id, last.status, last.amount, made.quantity, made.note, last.id
FROM (SELECT data->>'item' AS item, stream_id, (data->>'quantity')::int AS quantity, (data->>'note')::varchar AS note
      FROM {EVENTS} WHERE type = '{ADDED}' AND id <= %(upto)s AND NOT data ? 'poison') AS made
JOIN (SELECT DISTINCT ON (data->>'item') data->>'item' AS item, data->>'status' AS status,
        (data->>'amount')::numeric(12, 2) AS amount, id
      FROM {EVENTS} WHERE type IN ('{ADDED}', '{CHANGED}') AND id <= %(upto)s AND NOT data ? 'poison'
      ORDER BY data->>'item', id DESC) AS last USING (item)
"""


def _rows(mix: Mix) -> Iterator[tuple[str, str, str]]:
    chance = random.Random(mix.seed)
    made: list[int] = []  # the number of the stream of each item
    for number in range(mix.events):
        draw = chance.random()
        is_poison = chance.random() < mix.poison
        amount, status = f"{chance.randrange(10**6) / 100:.2f}", chance.choice(STATUSES)
        if draw < 0.41 or (draw < 0.90 and not made):
            stream = chance.randrange(mix.streams)
            kind, item = ADDED, len(made)
            if not is_poison:
                made.append(stream)
        elif draw < 0.90:
            kind, item = CHANGED, chance.randrange(len(made))
            stream = made[item]
        else:
            kind, item, stream = NOTED, number, chance.randrange(mix.streams)
        data = {
            "item": f"i-{item:09d}" if not is_poison else f"p-{number:09d}",
            "status": status, "amount": amount, "quantity": number % 97, "note": f"{PADDING} {number}",
            **({"poison": True} if is_poison else {}),
        }  # fmt: skip
        yield f"s-{stream:07d}", kind, json.dumps(data)


def _settle_down(table: str) -> None:
    """Let no contender pay for what the load has left to do."""
    with connection.cursor() as cursor:
        cursor.execute(f"VACUUM ANALYZE {table}")
