"""Each guard, a patch that removes it, and the test that must then fail."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["MUTATIONS", "Mutation"]


class Mutation(NamedTuple):
    """`old` stands exactly once in `path`; with `new` in its place the guard is gone and `test` must fail."""

    guard: str
    path: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation(
        "the epoch check of a batch",
        "scriba/targets/orm.py",
        "AND epoch = {epoch:d})",
        "AND epoch >= 0 * {epoch:d})",
        "tests/integration/target/test_fence.py::test_a_batch_of_an_older_epoch_writes_nothing",
    ),
    Mutation(
        "the second raise of a takeover",
        "scriba/ledger.py",
        '"UPDATE scriba_segments SET epoch = epoch + 1, heartbeat_at = clock_timestamp(), "',
        '"UPDATE scriba_segments SET epoch = epoch + 0, heartbeat_at = clock_timestamp(), "',
        "tests/integration/ledger/test_takeover.py::test_a_check_older_than_the_first_raise_is_answered_by_the_second",
    ),
    Mutation(
        "the FOR UPDATE of a takeover",
        "scriba/ledger.py",
        "AND {_OURS} FOR UPDATE",
        "AND {_OURS}",
        "tests/integration/ledger/test_takeover.py",
    ),
    Mutation(
        "the first position in the cursor's condition",
        "scriba/positions.py",
        "AND known.position < given.first",
        "AND known.position < given.last",
        "tests/integration/engine/test_lost_answers.py::test_a_cursor_inside_a_batch_refuses_the_whole_batch",
    ),
    Mutation(
        "distrust after a commit without an answer",
        "scriba/engine/pipeline.py",
        "self._lookup_below = max(self._lookup_below, batch[-1].event.position)\n\n    # --- after a batch that did",
        "\n\n    # --- after a batch that did",
        "tests/integration/engine/test_lost_answers.py",
    ),
    Mutation(
        "the gapless rule of the watermark",
        "scriba/engine/lanes.py",
        "min([routed, *(position - 1 for position in oldest)])",
        "routed",
        "tests/unit/engine/test_lanes.py::test_the_watermark_never_passes_an_unsettled_event",
    ),
    Mutation(
        "the undo of on_commit hooks",
        "scriba/targets/orm.py",
        "                raise WriteFailed(classify(error), guilty=False) from error\n        del self._connection.run_on_commit[hooks:]",
        "                raise WriteFailed(classify(error), guilty=False) from error",
        "tests/integration/engine/test_end_to_end.py::"
        "test_on_commit_hooks_run_once_after_the_commit_and_never_for_a_failed_attempt",
    ),
    Mutation(
        "the check that the transaction is still good",
        "scriba/targets/condition.py",
        '        """Say whether the transaction could commit as it is."""\n',
        '        """Say whether the transaction could commit as it is."""\n        return True\n',
        "tests/integration/engine/test_swallowed_errors.py",
    ),
    Mutation(
        "the layer that keeps the order of one row's writes",
        "scriba/targets/layers.py",
        "self._append(entry, max(layer, earlier.layer + 1))",
        "self._append(entry, layer)",
        "tests/unit/test_folding_layers.py",
    ),
    Mutation(
        "the quoting of array literals",
        "scriba/targets/literals.py",
        """.replace('"', '\\\\"')""",
        "",
        "tests/unit/test_folding_literals.py",
    ),
    Mutation(
        "the lock-holder evidence of TableSource",
        "scriba/sources/horizon.py",
        "for pair in left if not pair.holders and pair.log",
        "for pair in left if pair.log",
        "tests/integration/sources/test_late_commits.py::test_the_lower_position_commits_last",
    ),
    Mutation(
        "the wait for writers before a start at current",
        "scriba/sources/starting.py",
        "return self._horizon.settled >= position",
        "return True",
        "tests/integration/sources/test_starting_at_current.py",
    ),
    Mutation(
        "the start that lies before what was in flight",
        "scriba/sources/starting.py",
        "return visible if lowest is None else int(lowest) - 1",
        "return visible",
        "tests/integration/sources/test_starting_at_current.py",
    ),
    Mutation(
        "the page that counts as read only when it is routed",
        "scriba/engine/reader.py",
        "        if not self._route(page):\n            return\n",
        "        self._route(page)\n",
        "tests/unit/engine/test_leaving.py",
    ),
    Mutation(
        "the keys that an undone half of a verdict pass has parked",
        "scriba/engine/pipeline.py",
        "held_then = set(held)",
        "held_then = held",
        "tests/unit/engine/test_lane_run.py::test_a_half_that_is_undone_parks_nobody",
    ),
    Mutation(
        "the wipeout circuit",
        "scriba/engine/circuit.py",
        "        if attempted > 1:\n            return True",
        "        if attempted > 1:\n            return False",
        "tests/integration/engine/test_end_to_end.py::test_a_column_that_is_never_filled_halts_and_dead_letters_nothing",
    ),
    Mutation(
        "the order of parked events in a replay",
        "scriba/engine/replay.py",
        'if stored.status == "parked" and stored.behind is not None:',
        'if stored.status == "parked" and stored.behind == -1:',
        "tests/unit/engine/test_replay.py::test_a_parked_event_is_not_applied_before_the_one_it_waits_for",
    ),
    Mutation(
        "the true key of a letter in a replay",
        "scriba/engine/replay.py",
        "    return Routed(event, stored.key if storable_key(key) == kept else key, error)\n",
        "    return Routed(event, stored.key, error)\n",
        "tests/unit/engine/test_replay_keys.py::test_a_later_event_of_the_true_key_refuses_the_replay",
    ),
    Mutation(
        "an event that came again under its true key",
        "scriba/engine/replay.py",
        "        return APPLIED_ALREADY\n",
        "        pass\n",
        "tests/unit/engine/test_replay_keys.py::test_an_event_that_came_again_under_its_true_key_is_not_applied_twice",
    ),
    Mutation(
        "order before a ceiling is passed",
        "scriba/engine/reader.py",
        "        if not ledger.raise_ceiling(self._lease, ceiling):\n            raise FenceLost\n",
        "",
        "tests/unit/engine/test_coordinator.py::test_nothing_is_handed_out_above_the_durable_ceiling",
    ),
    Mutation(
        "another epoch after a handler that did not come back",
        "scriba/engine/coordinator.py",
        "if self._late_under is self._lease and not self._stopping.is_set():",
        "if False:",
        "tests/unit/engine/test_coordinator.py::"
        "test_a_handler_late_at_a_halt_that_could_not_be_recorded_commits_nothing_beside_the_next_term",
    ),
    Mutation(
        "no blame before a batch has come to its events",
        "scriba/engine/pipeline.py",
        "bounded=failure.bounded and self._is_theirs",
        "bounded=failure.bounded",
        "tests/unit/engine/test_lane_run.py::test_a_wait_for_the_fence_is_no_events_fault_however_long_it_takes",
    ),
    Mutation(
        "a read that goes ahead of no write on its row",
        "scriba/targets/layers.py",
        "return table in self._drawn or key in self._rows.get(table, ())",
        "return table in self._drawn",
        "tests/integration/target/test_row_reads.py::test_a_row_that_a_write_waits_for_is_read_after_it",
    ),
    Mutation(
        "a read that goes ahead of no row whose key is drawn",
        "scriba/targets/layers.py",
        "return table in self._drawn or key in self._rows.get(table, ())",
        "return key in self._rows.get(table, ())",
        "tests/integration/target/test_row_reads.py::test_a_row_with_a_key_that_the_database_will_draw_may_be_any_row",
    ),
    Mutation(
        "the verdict pass without reads ahead",
        "scriba/targets/orm.py",
        "apart = {} if verdict else",
        "apart = {} if verdict is None else",
        "tests/integration/target/test_row_reads.py::test_a_read_ahead_that_fails_is_judged_again_with_a_savepoint",
    ),
    Mutation(
        "nobody blamed for a read ahead before the verdict pass",
        "scriba/targets/orm.py",
        "raise WriteFailed(_NO_SAVEPOINT, guilty=False) from cause",
        "pass",
        "tests/integration/target/test_row_reads.py::test_a_read_ahead_that_fails_is_judged_again_with_a_savepoint",
    ),
    Mutation(
        "the replay without reads ahead",
        "scriba/engine/replay.py",
        "batch(self._lease.fence, verdict=True)",
        "batch(self._lease.fence)",
        "tests/integration/target/test_row_reads_in_replays.py::test_a_replay_whose_read_meets_a_lock_waits_for_the_next_look",
    ),
    Mutation(
        "the count of a batch's cursors",
        "scriba/positions.py",
        "        if written != len(moves):\n",
        "        if written > len(moves):\n",
        "tests/integration/target/test_settling.py::test_a_cursor_at_or_beyond_the_first_position_refuses_the_batch",
    ),
    Mutation(
        "the row of a lane's counters",
        "scriba/positions.py",
        "self.has_counters = cursor.rowcount > 0",
        "self.has_counters = True",
        "tests/integration/target/test_settling.py::test_counters_add_up_in_the_lanes_row",
    ),
    Mutation(
        "a lane that is closed while it lingers",
        "scriba/engine/lanes.py",
        "            if self._closed:\n                return None\n",
        "            if self._closed and not self._queue:\n                return None\n",
        "tests/unit/engine/test_lanes.py::test_a_lane_that_is_closed_while_its_worker_lingers_hands_nothing_out",
    ),
]
