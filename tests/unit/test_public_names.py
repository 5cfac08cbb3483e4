"""``import scriba``: what it costs, and that its names are what they say."""

from __future__ import annotations

import importlib
import pkgutil
import subprocess
import sys
from types import ModuleType

import scriba


def test_importing_scriba_needs_no_settings_and_reaches_no_model() -> None:
    """A settings module, another app's models, or a plain interpreter may import it."""
    program = (
        "import sys, scriba\n"
        "assert 'scriba.models' not in sys.modules\n"
        "from django.conf import settings\n"
        "assert not settings.configured\n"
    )

    subprocess.run([sys.executable, "-c", program], check=True, env={"PATH": ""}, timeout=60)


def test_no_public_name_is_hidden_by_a_module() -> None:
    """Importing ``scriba.x`` binds the module to the name ``x`` of the package, over a function of that name.

    That is why no module may be called like a public name, unless ``import scriba`` itself loads it before it binds
    the name.
    """
    for module in pkgutil.iter_modules(scriba.__path__):
        if module.name in scriba.__all__:
            importlib.import_module(f"scriba.{module.name}")

    hidden = [name for name in scriba.__all__ if isinstance(getattr(scriba, name), ModuleType)]

    assert hidden == []
