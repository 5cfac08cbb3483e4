"""settings.SCRIBA: typed, read live, refused with a message when wrong."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import override_settings

from scriba.conf import Settings, scriba_settings
from scriba.exceptions import ConfigurationError


def test_no_setting_means_the_defaults() -> None:
    """Scriba runs without any setting."""
    with override_settings():
        from django.conf import settings

        if hasattr(settings, "SCRIBA"):
            del settings.SCRIBA

        assert scriba_settings() == Settings()


def test_settings_are_read_live() -> None:
    """A changed setting holds at the next look: tests and shells need no restart."""
    with override_settings(SCRIBA={"lease_s": 1}):
        inside = scriba_settings().lease_s
    with override_settings(SCRIBA={}):
        outside = scriba_settings().lease_s

    assert (inside, outside) == (1, 15.0)


def test_every_key_takes_a_value_of_its_kind() -> None:
    """All keys can be set at once, lists of SQLSTATEs as lists."""
    given: dict[str, Any] = {
        "lease_s": 2,
        "drain_timeout_s": 3.5,
        "busy_poll_s": 0.02,
        "idle_poll_s": 1,
        "max_bytes_in_flight": 1000,
        "max_letter_bytes": 100,
        "redact": lambda event_type, data: None,
        "listen": False,
        "audit_kept_s": 86_400,
        "audit_most": 100,
        "transient_sqlstates": ["55000", "XX"],
        "integrity_sqlstates": ("P0002",),
        "structural_sqlstates": {"57P05"},
    }

    with override_settings(SCRIBA=given):
        settings = scriba_settings()

    assert set(given) == set(Settings.__dataclass_fields__)
    assert settings.transient_sqlstates == ("55000", "XX")
    assert settings.redact is given["redact"]
    assert settings.listen is False


def test_an_unknown_key_is_answered_with_the_closest_one() -> None:
    """A misspelt key never silently keeps the default."""
    with override_settings(SCRIBA={"lease": 5}), pytest.raises(ConfigurationError, match="did you mean 'lease_s'"):
        scriba_settings()


def test_the_setting_must_be_a_dict() -> None:
    """A list or a string is refused with its value."""
    with override_settings(SCRIBA=["lease_s"]), pytest.raises(ConfigurationError, match="must be a dict, not"):
        scriba_settings()


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("lease_s", "15", "seconds above 0"),
        ("lease_s", 0, "seconds above 0"),
        ("idle_poll_s", float("inf"), "seconds above 0"),
        ("busy_poll_s", True, "seconds above 0"),
        ("max_letter_bytes", 0.5, "whole number of bytes above 0"),
        ("max_bytes_in_flight", -1, "whole number of bytes above 0"),
        ("audit_most", 0, "whole number of entries above 0"),
        ("listen", 1, "True or False"),
        ("redact", "myapp.redact", "a callable"),
        ("transient_sqlstates", "40001", "a list of SQLSTATEs"),
        ("integrity_sqlstates", ["4"], "a list of SQLSTATEs"),
        ("structural_sqlstates", [40001], "a list of SQLSTATEs"),
    ],
)
def test_a_value_of_another_kind_is_refused(key: str, value: object, accepted: str) -> None:
    """The message names the key, what it accepts and what it was given."""
    with override_settings(SCRIBA={key: value}), pytest.raises(ConfigurationError) as caught:
        scriba_settings()

    assert key in str(caught.value)
    assert accepted in str(caught.value)
    assert repr(value) in str(caught.value)
