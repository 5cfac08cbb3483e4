"""Scenarios in which contenders run the same events from the origin: in cycles, one after the other.

Ratios are formed inside each cycle, between neighbours in time, so that a machine that is slow for a minute is slow for
both; what is shown is their median, with their range. After each run every row is compared with what it must be.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from django.core.management.base import CommandError
from django.db import connection

from example_project.bench import contenders, workload
from example_project.bench.measuring import Cost, Spread, in_child
from example_project.bench.workload import TABLE, Mix

__all__ = ["RACES", "Finding", "Options", "Report"]


class Options(NamedTuple):
    """What the command line says. `events` and `slice` are for the fast and for the slow contenders."""

    events: int
    slice: int
    cycles: int
    contenders: tuple[str, ...]
    seconds: float
    rows: int
    say: Callable[[str], None]


class Finding(NamedTuple):
    """A target and what was measured."""

    what: str
    target: str
    measured: Spread
    is_met: bool


class Report(NamedTuple):
    scenario: str
    costs: dict[str, list[Cost]]
    findings: list[Finding]


class Runner(NamedTuple):
    """One contender of a race: how much it gets, how it runs, and what must lie there before."""

    events: int
    run: Callable[[int], Cost]
    mix: Mix | None = None  #: reload before the run; None: what is there is right
    before: Callable[[], None] | None = None
    after: Callable[[], None] | None = None


def race(options: Options, runners: dict[str, Runner]) -> dict[str, list[Cost]]:
    """Run all in each cycle, in turns that begin elsewhere each time; verify each; return the costs of each."""
    costs: dict[str, list[Cost]] = {name: [] for name in runners}
    for cycle in range(options.cycles):
        names = list(runners)
        turn = cycle % len(names)
        for name in names[turn:] + names[:turn]:
            cost = _one(name, runners[name])
            costs[name].append(cost)
            options.say(f"cycle {cycle + 1}: {name:<18} {cost.rate:>10,.0f} events/s")
    return costs


def _one(name: str, runner: Runner) -> Cost:
    if runner.mix is not None:
        in_child(workload.load, runner.mix)
    workload.clear()
    if runner.before is not None:
        runner.before()
    cost: Cost = in_child(runner.run, runner.events)
    if runner.after is not None:
        runner.after()
    wrong = workload.wrong_rows(runner.events)
    if wrong:
        message = f"{name}: {wrong} rows of the read model are not what the events say"
        raise CommandError(message)
    return cost


def at_least(what: str, wanted: float, ours: list[Cost], theirs: list[Cost]) -> Finding:
    """Compare rates, cycle by cycle."""
    ratio = Spread.of([own.rate / other.rate for own, other in zip(ours, theirs, strict=True)])
    return Finding(what, f"≥ {wanted:g}-fold", ratio, ratio.median >= wanted)


def at_most(what: str, wanted: float, unit: str, values: list[float]) -> Finding:
    spread = Spread.of(values)
    return Finding(what, f"≤ {wanted:g} {unit}", spread, spread.median <= wanted)


# --- scenarios ------------------------------------------------------------------------------------------

SCRIBA = {f"scriba-{lanes}": partial(contenders.scriba, lanes=lanes) for lanes in (1, 4, 8)}
OURS = "scriba-4"


def catchup(options: Options) -> Report:
    """Everybody against everybody."""
    runners = {
        "naive": Runner(options.slice, contenders.naive),
        "lean": Runner(options.slice, contenders.lean),
        **_peer(options),
        **{f"raw-{size}": Runner(options.events, partial(contenders.raw, batch=size)) for size in (50, 500, 5_000)},
        **{name: Runner(options.events, run) for name, run in SCRIBA.items()},
    }
    wanted = {name: runner for name, runner in runners.items() if not options.contenders or name in options.contenders}
    in_child(workload.load, Mix(options.events))
    costs = race(options, wanted)
    against = {"naive": 150, "eventsourcing": 50, "raw-5000": 0.6}
    findings = [
        at_least(f"{OURS} against {name}", ratio, costs[OURS], costs[name])
        for name, ratio in against.items()
        if name in costs and OURS in costs
    ]
    if OURS in costs and all(cost.server_us is not None for cost in costs[OURS]):
        both = [cost.python_us + (cost.server_us or 0) for cost in costs[OURS]]
        findings.append(at_most("CPU per event, Python and PostgreSQL together", 25, "µs", both))
    return Report("catchup", costs, findings)


def _peer(options: Options) -> dict[str, Runner]:
    try:
        from example_project.bench.peer import eventsourcing  # noqa: PLC0415 - an optional package
    except ImportError:
        options.say("eventsourcing is not installed: left out")
        return {}
    return {"eventsourcing": Runner(options.slice, eventsourcing)}


def reading_handler(options: Options) -> Report:
    """A handler that reads a row through the ORM before it changes it."""
    in_child(workload.load, Mix(options.slice * 4))  # Scriba takes all that there is
    run = partial(contenders.scriba, lanes=4, handler=contenders.reading)
    costs = race(options, {"naive": Runner(options.slice, contenders.naive), "reading": Runner(options.slice * 4, run)})
    return Report("reading-handler", costs, [at_least("against naive", 3, costs["reading"], costs["naive"])])


def poison(options: Options) -> Report:
    """One event in a hundred cannot be applied."""
    clean, spoilt = Mix(options.events), Mix(options.events, poison=0.01)
    costs = race(
        options,
        {
            "clean": Runner(options.events, SCRIBA[OURS], clean),
            "poison": Runner(options.events, SCRIBA[OURS], spoilt, after=_check_letters),
        },
    )
    return Report("poison", costs, [at_least("against the clean rate", 0.5, costs["poison"], costs["clean"])])


def _check_letters() -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT count(*) FROM (SELECT id FROM bench_benchevent WHERE data ? 'poison') AS poison"
            " FULL JOIN scriba_dead_letters ON position = poison.id WHERE poison.id IS NULL OR position IS NULL"
        )
        (wrong,) = cursor.fetchone()
    if wrong:
        message = f"{wrong} dead letters are missing or too many"
        raise CommandError(message)


def hot_stream(options: Options) -> Report:
    """All events on one stream."""
    costs = race(
        options,
        {
            "many": Runner(options.events, SCRIBA[OURS], Mix(options.events)),
            "one": Runner(options.events, SCRIBA[OURS], Mix(options.events, streams=1)),
        },
    )
    return Report("hot-stream", costs, [at_least("against many streams", 0.5, costs["one"], costs["many"])])


def large_read_model(options: Options) -> Report:
    """Rows that were there before: a plan that was made for an empty table would read them all, for each batch."""
    in_child(workload.load, Mix(options.events))
    runner = Runner(options.events, SCRIBA[OURS], before=partial(_fill, options.rows), after=_empty)
    costs = race(options, {"empty": Runner(options.events, SCRIBA[OURS]), "large": runner})
    what = f"with {options.rows:,} rows, against an empty read model"
    return Report("large-read-model", costs, [at_least(what, 0.5, costs["large"], costs["empty"])])


def _fill(rows: int) -> None:
    with connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {TABLE} (id, stream_id, status, amount, quantity, note, position)"
            " SELECT 'x-' || n, 'x-' || n %% 100000, 'open', 1, 1, %s, 0 FROM generate_series(1, %s) AS n",
            [workload.PADDING, rows],
        )
        cursor.execute(f"VACUUM ANALYZE {TABLE}")
        cursor.execute("CHECKPOINT")


def _empty() -> None:
    with connection.cursor() as cursor:
        cursor.execute(f"DELETE FROM {TABLE} WHERE id LIKE 'x-%'")


def memory(options: Options) -> Report:
    """One long catch-up: is the memory bounded, and is it flat?"""
    in_child(workload.load, Mix(options.events))
    costs = race(options._replace(cycles=1), {OURS: Runner(options.events, partial(SCRIBA[OURS], samples=True))})
    (cost,) = costs[OURS]
    samples: list[float] = cost.extra["resident_mb"]
    quarter = max(1, len(samples) // 4)
    growth = max(samples[-quarter:]) / max(samples[quarter : 2 * quarter] or samples)
    findings = [
        at_most("peak of resident memory", 150, "MB", [cost.peak_mb]),
        at_most("last quarter against the second", 1.1, "fold", [growth]),
    ]
    return Report("memory", costs, findings)


RACES: dict[str, Callable[[Options], Report]] = {
    "catchup": catchup,
    "reading-handler": reading_handler,
    "poison": poison,
    "hot-stream": hot_stream,
    "large-read-model": large_read_model,
    "memory": memory,
}
