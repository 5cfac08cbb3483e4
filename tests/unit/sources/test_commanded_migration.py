"""Where a projection may go on that takes over from a projector: only where the number can be trusted."""

from __future__ import annotations

from typing import Any

import pytest

from scriba.sources.commanded_migration import Projector, StoreView, Subscribed, judge


def judged(number: int | None, *subscriptions: Subscribed, counter: int = 1_000, stream: str = "$all") -> Any:
    return judge(
        Projector("old", number), StoreView(stream, counter, {"old": list(subscriptions)} if subscriptions else {})
    )


def test_a_projector_in_step_with_its_subscription_has_no_remarks() -> None:
    """Subscribed to `$all` and acknowledged exactly what is projected: the number is the starting point."""
    finding = judged(185, Subscribed("$all", 185))

    assert (finding.start, list(finding.remarks), finding.holder) == (185, [], "")


@pytest.mark.case("A22")
def test_a_subscription_behind_the_projector_is_a_window_that_was_applied() -> None:
    """After a crash between commit and acknowledgement the number is ahead: it decides, and the window is named."""
    finding = judged(185, Subscribed("$all", 180))

    assert finding.start == 185
    assert "acknowledges only 180: 181 to 185 are in the read model" in finding.remarks[0]


def test_a_subscription_ahead_of_the_projector_is_the_usual_case() -> None:
    """Events that did not concern the projector moved only its subscription: they may be offered again."""
    finding = judged(170, Subscribed("$all", 185))

    assert finding.start == 170
    assert "what came after 170 did not concern the projector" in finding.remarks[0]


def test_a_projector_of_one_stream_has_no_global_number() -> None:
    """Subscribed to a stream, the number is that stream's version: no starting point in `$all`."""
    finding = judged(12, Subscribed("account-1", 12))

    assert finding.start is None
    assert "it was subscribed to account-1, not only to $all" in finding.remarks[0]


def test_a_projector_of_one_stream_has_a_number_in_that_stream() -> None:
    """A projection that reads the same single stream may go on from its version."""
    assert judged(12, Subscribed("account-1", 12), stream="account-1", counter=14).start == 12
    assert judged(15, Subscribed("account-1", 15), stream="account-1", counter=14).start is None


def test_a_projector_with_several_subscriptions_is_doubtful() -> None:
    """With streams besides `$all` the number may be a version; only one that `$all` acknowledged is plausible."""
    also = Subscribed("account-1", 400)

    assert judged(185, Subscribed("$all", 185), also).start == 185
    assert judged(400, Subscribed("$all", 185), also).start is None
    assert all("not only to $all" in judged(number, Subscribed("$all", 185), also).remarks[0] for number in (185, 400))


def test_a_projector_without_a_subscription_is_believed_with_a_warning() -> None:
    """Where the event store has no such subscription, somebody has to know what it was subscribed to."""
    finding = judged(185)

    assert finding.start == 185
    assert "make sure that the projector subscribed to $all" in finding.remarks[0]


def test_a_number_beyond_the_store_is_of_another_store() -> None:
    """A number above the store's counter cannot be one of its numbers."""
    finding = judged(1_001, Subscribed("$all", 1_001))

    assert finding.start is None
    assert "1001 is beyond the end of $all (1000)" in finding.remarks[0]


def test_a_null_number_says_nothing() -> None:
    """The old library took every event for seen then: nothing is known about the read model."""
    finding = judged(None, Subscribed("$all", 5))

    assert finding.start is None
    assert "its number is NULL" in finding.remarks[0]


def test_a_running_projector_is_named() -> None:
    """Its number moves as long as it runs."""
    finding = judged(185, Subscribed("$all", 185, "pid 7 (application 'beam')"))

    assert finding.holder == "pid 7 (application 'beam')"
    assert "in use by pid 7" in finding.remarks[0]


def test_without_an_event_store_nothing_is_compared() -> None:
    """The number is shown, and that it was not compared."""
    finding = judge(Projector("old", 9), None)

    assert finding.start == 9
    assert "not compared with an event store" in finding.remarks[0]
