"""RetryPolicy: how often, how long in between, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from scriba.exceptions import ConfigurationError
from scriba.retry import RetryPolicy


def test_three_attempts_wait_a_tenth_and_a_second_by_default() -> None:
    """The default policy calls a failing handler three times and then gives up."""
    policy = RetryPolicy()

    waits = [policy.wait_after(attempt) for attempt in (1, 2, 3)]

    assert waits == [0.1, 1.0, None]


def test_the_third_default_wait_serves_a_fourth_attempt() -> None:
    """Raising only the number of attempts by one needs no new list of waits."""
    assert RetryPolicy(attempts=4).wait_after(3) == 10.0


@pytest.mark.parametrize("value", [None, True, {}])
def test_nothing_and_true_mean_the_defaults(value: object) -> None:
    """``retry=True`` and no retry option are the same policy."""
    assert RetryPolicy.parse(value) == RetryPolicy()


def test_false_means_one_attempt() -> None:
    """``retry=False`` gives up after the first call."""
    assert RetryPolicy.parse(False).wait_after(1) is None


def test_a_mapping_is_merged_with_the_defaults() -> None:
    """Only the keys that are given replace the defaults."""
    assert RetryPolicy.parse({"attempts": 2}) == RetryPolicy(attempts=2)


def test_a_policy_is_taken_as_it_is() -> None:
    """Parsing a policy changes nothing."""
    policy = RetryPolicy(attempts=7, backoff=[0.5] * 6)

    assert RetryPolicy.parse(policy) is policy


def test_waits_are_frozen_with_the_policy() -> None:
    """A list that is changed afterwards does not change the policy made from it."""
    waits = [1, 2]
    policy = RetryPolicy(backoff=waits)

    waits.clear()

    assert policy.wait_after(2) == 2


@pytest.mark.parametrize("attempts", [0, -1, 1.5, "3", True, None])
def test_attempts_must_be_a_whole_number_of_at_least_one(attempts: Any) -> None:
    """A policy that would never call the handler, or cannot be counted, is refused with the value."""
    with pytest.raises(ConfigurationError, match=f"at least 1, not {attempts!r}"):
        RetryPolicy(attempts=attempts)


@pytest.mark.parametrize(
    "backoff", ["1,2", 5, [0.1, -1], [0.1, float("nan")], [0.1, float("inf")], [True, 1], [None, 1]]
)
def test_waits_must_be_finite_seconds(backoff: Any) -> None:
    """A wait that never ends, or is no number of seconds, is refused."""
    with pytest.raises(ConfigurationError, match="backoff must be a list of seconds"):
        RetryPolicy(backoff=backoff)


def test_too_few_waits_are_refused_with_the_needed_number() -> None:
    """Five attempts need four waits: the message says both numbers."""
    with pytest.raises(ConfigurationError, match="5 attempts need 4 waits between them, but backoff has 3"):
        RetryPolicy(attempts=5)


def test_one_attempt_needs_no_wait() -> None:
    """A policy of one attempt may have an empty list."""
    assert RetryPolicy(attempts=1, backoff=()).wait_after(1) is None


def test_a_misspelt_key_is_answered_with_the_right_one() -> None:
    """Unknown keys of the mapping form are refused, with the closest known one."""
    with pytest.raises(ConfigurationError, match="unknown key 'attempt'; did you mean 'attempts'"):
        RetryPolicy.parse({"attempt": 3})


@pytest.mark.parametrize("value", ["3", 3, [3]])
def test_other_shapes_are_refused_with_the_accepted_ones(value: object) -> None:
    """A bare number is refused: it could mean attempts or seconds."""
    with pytest.raises(ConfigurationError, match="must be a RetryPolicy, a mapping, True or False"):
        RetryPolicy.parse(value)
