"""Scenarios that look at one situation: events that come at a steady rate, many cursors, a deep log, busy writers."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, Final

from django.db import connection, transaction

from example_project.bench import contenders, workload
from example_project.bench.measuring import Arrivals, Cost, Meter, Spread, at_rate, in_child, start_child
from example_project.bench.models import BenchEvent, BenchRow
from example_project.bench.races import OURS, SCRIBA, Finding, Options, Report, at_most
from example_project.bench.workload import ADDED, EVENTS, Mix
from scriba import EventMeta, projection, start_projection
from scriba.engine.collector import spared_collector
from scriba.protocols import Identity, Shard
from scriba.sources import TableSource

__all__ = ["SITUATIONS"]

# --- steady ---------------------------------------------------------------------------------------------


def steady(options: Options) -> Report:
    """Events one by one at a rate; from the commit of an event to the commit of its row, with wake-up."""
    peer = _steady_peer()
    costs: dict[str, list[Cost]] = {"200 events/s": [], **({PEER: []} if peer else {}), "1000 events/s": []}
    for _ in range(options.cycles):
        for name, found in costs.items():
            rate = 1_000 if name.startswith("1000") else 200
            found.append(_steadily(options, name, rate, peer if peer and name == PEER else _tail))
    findings: list[Finding] = []
    for name, limits in (("200 events/s", {50: 3.0, 99: 10.0}), ("1000 events/s", {99: 25.0})):
        for share, limit in limits.items():
            findings.append(at_most(f"p{share} at {name}", limit, "ms", _late(costs[name], share)))
        wanted = 0.9 * float(name.split()[0])
        reached = Spread.of([cost.extra["appended_per_s"] for cost in costs[name]])
        findings.append(Finding(f"appended at {name}", f"≥ {wanted:g}/s", reached, reached.median >= wanted))
    for share in (50, 99) if peer else ():
        pairs = zip(_late(costs["200 events/s"], share), _late(costs[PEER], share), strict=True)
        findings.append(at_most(f"p{share} against {PEER}", 1, "fold", [own / theirs for own, theirs in pairs]))
    return Report("steady", costs, findings)


PEER = "eventsourcing 200/s"


def _steady_peer() -> Callable[[int, int], Cost] | None:
    try:
        from example_project.bench.peer import tail  # noqa: PLC0415 - an optional package
    except ImportError:
        return None
    return tail


def _late(costs: list[Cost], share: int) -> list[float]:
    return [cost.extra[f"p{share}_ms"] for cost in costs]


def _steadily(options: Options, name: str, rate: int, project: Callable[[int, int], Cost]) -> Cost:
    in_child(workload.load, Mix(0))
    workload.clear()
    cost: Cost = in_child(project, rate, int(options.seconds * rate))
    options.say(f"{name}: p50 {cost.extra['p50_ms']:.1f} ms, p99 {cost.extra['p99_ms']:.1f} ms")
    return cost


def _tail(rate: int, count: int) -> Cost:
    """Project while another process appends; the handler notes when its row is committed, by ``on_commit``."""
    arrivals = Arrivals(count)

    def handler(data: Any, meta: EventMeta) -> object:
        transaction.on_commit(partial(arrivals.note, meta.position))
        return contenders.declared(data, meta)

    source = TableSource(BenchEvent, wakeup="notify")
    made = projection("bench", source=source, parallelism=4, models=[BenchRow])(handler)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    append = start_child(at_rate, rate, count, _append_one)
    with spared_collector(), start_projection(made) as handle:
        meter = Meter()
        arrivals.wait(lambda: handle.wait(0))  # raises what it ended with
        meter.ended()
        cost = meter.cost(count)
    return arrivals.judged(cost, *append())


def _append_one(number: int) -> int:
    """Append one event and notify, in one statement and transaction: who appends shall not take the machine."""
    event = _event(number)
    with connection.cursor() as cursor:
        cursor.execute(
            f"WITH appended AS (INSERT INTO {EVENTS} (stream_id, type, data) VALUES (%s, %s, %s) RETURNING id)"
            " SELECT id, pg_notify(%s, '') FROM appended",
            [event.stream_id, event.type, json.dumps(event.data), TableSource(BenchEvent).channel()],
        )
        (position, _) = cursor.fetchone()
    return int(position)


def _event(number: int) -> BenchEvent:
    data = {
        "item": f"i-{os.getpid()}-{number:09d}", "status": "open", "amount": "9.99", "quantity": 1,
        "note": f"{workload.PADDING} {number}",
    }  # fmt: skip
    return BenchEvent(stream_id=f"s-{number % 1000}", type=ADDED, data=data)


# --- many streams ---------------------------------------------------------------------------------------


def many_streams(options: Options) -> Report:
    """Millions of cursors from before, and some events behind: how soon is the first commit, and at which memory?"""
    behind = min(options.events, 10_000)
    costs: dict[str, list[Cost]] = {"no cursors": [], f"{options.rows:,} cursors": []}
    for rows, found in zip((0, options.rows), costs.values(), strict=True):
        for _ in range(options.cycles):
            in_child(workload.load, Mix(behind))
            workload.clear()
            in_child(SCRIBA[OURS], behind)
            _seed_cursors(rows)
            with connection.cursor() as cursor:
                cursor.execute(
                    f"INSERT INTO {EVENTS} (stream_id, type, data) SELECT stream_id, 'Noted', data FROM {EVENTS} ORDER BY id"
                )
            found.append(in_child(SCRIBA[OURS], behind))
            options.say(f"{rows:,} cursors: first commit after {found[-1].extra['first_commit_s']:.2f} s")
    without, many = costs.values()
    growth = [large.peak_mb / small.peak_mb for large, small in zip(many, without, strict=True)]
    findings = [
        at_most("start to first commit", 2, "s", [cost.extra["first_commit_s"] for cost in many]),
        at_most("peak of memory against no cursors", 1.1, "fold", growth),
    ]
    return Report("many-streams", costs, findings)


def _seed_cursors(rows: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "INSERT INTO scriba_positions (projection_name, projection_version, stream_id, position, updated_at)"
            " SELECT 'bench', 1, 'x-' || n, 1, now() FROM generate_series(1, %s) AS n",
            [rows],
        )
        cursor.execute("VACUUM ANALYZE scriba_positions")
        cursor.execute("CHECKPOINT")


# --- a deep log -----------------------------------------------------------------------------------------


def deep_log(options: Options) -> Report:
    """The cost of a page at the beginning of the log and at its end."""
    in_child(workload.load, Mix(0))
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {EVENTS} (stream_id, type, data) SELECT 's-' || n %% 1000, 'Noted', jsonb_build_object('n', n)"
            " FROM generate_series(1, %s) AS n",
            [options.rows],
        )
        cursor.execute(f"VACUUM ANALYZE {EVENTS}")
    pages = max(1, min(20, options.rows // 2_000))
    deep = options.rows - (pages + 1) * 1_000
    costs: dict[str, list[Cost]] = {"at 0": [], f"at {deep:,}": []}
    for cycle in range(options.cycles):
        turns = list(zip((0, deep), costs.values(), strict=True))
        for after, found in turns if cycle % 2 else reversed(turns):
            found.append(in_child(_read, after, pages))
    first, last = costs.values()
    ratios = [end.extra["page_ms"] / begin.extra["page_ms"] for begin, end in zip(first, last, strict=True)]
    return Report("deep-log", costs, [at_most("a page at the end against the beginning", 1.2, "fold", ratios)])


def _read(after: int, pages: int) -> Cost:
    """Read `pages` pages of 1,000 events; the time of a page is the median, after pages that warm up."""
    subscription = TableSource(BenchEvent).subscribe(Identity("bench", 1), [Shard(resume=after)])
    try:
        for _ in range(4):  # pages grow from a small one on
            at = subscription.fetch(1_000, 0.0).scanned
        meter, times, events = Meter(), [], 0
        for _ in range(max(1, pages - 4)):
            started = time.monotonic()
            page = subscription.fetch(1_000, 0.0)
            times.append(time.monotonic() - started)
            events += len(page.events)
            at = page.scanned
        cost = meter.cost(events)
    finally:
        subscription.close()
    cost.extra.update(page_ms=median(times) * 1000, scanned=at)
    return cost


# --- writers --------------------------------------------------------------------------------------------


WRITERS: Final = 8
PAUSE_S: Final = 0.01  #: of a writer between two transactions: the rest of its request


def writers(options: Options) -> Report:
    """What those who append lose while a projection tails the table by polling."""
    costs: dict[str, list[Cost]] = {"alone": [], "tailed": []}
    for cycle in range(options.cycles):
        names = list(costs)
        for name in names if cycle % 2 else reversed(names):
            in_child(workload.load, Mix(0))
            workload.clear()
            costs[name].append(in_child(partial(_busily, options.seconds), name == "tailed"))
            options.say(f"{name}: {costs[name][-1].rate:,.0f} appended/s")
    lost = [(1 - tailed.rate / alone.rate) * 100 for alone, tailed in zip(*costs.values(), strict=True)]
    return Report("writers", costs, [at_most("throughput that writers lose", 3, "%", lost)])


def _busily(seconds: float, is_tailed: bool) -> Cost:  # noqa: FBT001 - one of two runs
    """Append from several processes; the costs of this process are those of the projection alone."""
    if not is_tailed:
        return _appended(seconds)
    made = projection("bench", source=TableSource(BenchEvent), parallelism=4, models=[BenchRow])(contenders.declared)
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1")
    with start_projection(made) as handle:
        cost = _appended(seconds)
        handle.wait(0)
    return cost


def _appended(seconds: float) -> Cost:
    meter = Meter()
    waiting: list[Callable[[], Any]] = [start_child(_append_for, seconds) for _ in range(WRITERS)]
    counts = [wait() for wait in waiting]
    return meter.cost(sum(counts))._replace(elapsed_s=seconds)


def _append_for(seconds: float) -> int:
    number, until = 0, time.monotonic() + seconds
    while time.monotonic() < until:
        _event(number).save()
        number += 1
        time.sleep(PAUSE_S)
    return number


SITUATIONS: dict[str, Callable[[Options], Report]] = {
    "steady": steady,
    "many-streams": many_streams,
    "deep-log": deep_log,
    "writers": writers,
}
