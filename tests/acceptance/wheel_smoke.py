"""What CI runs with the installed wheel, outside of the repository: a project of one app, from nothing to its rows.

Usage: python wheel_smoke.py FOLDER, with DATABASE_URL set to a server that it may make a database on. It needs nothing
but the wheel and psycopg, and prints ``wheel ok``.
"""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import psycopg

DATABASE = "scriba_wheel"
SETTINGS = textwrap.dedent(
    """
    import os
    import psycopg

    about = psycopg.conninfo.conninfo_to_dict(os.environ["DATABASE_URL"])
    DATABASES = {
        "default": {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": os.environ["DATABASE_NAME"],
            **{name.upper(): about[name] for name in ("user", "password", "host", "port") if name in about},
        }
    }
    INSTALLED_APPS = ["django.contrib.contenttypes", "scriba", "smoke"]
    DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"
    SECRET_KEY = "none"
    USE_TZ = True
    """
)
MODELS = textwrap.dedent(
    """
    from django.db import models

    class Fact(models.Model):
        stream_id = models.TextField()
        type = models.TextField()
        data = models.JSONField(default=dict)

    class Seen(models.Model):
        position = models.BigIntegerField()
    """
)
PROJECTIONS = textwrap.dedent(
    """
    from scriba import Insert, projection
    from scriba.sources import TableSource
    from smoke.models import Fact, Seen

    @projection("smoke", source=TableSource(Fact), parallelism=2)
    def smoke(event, meta):
        return Insert(Seen(position=meta.position))
    """
)
APPEND = (
    "from smoke.models import Fact; Fact.objects.bulk_create(Fact(stream_id=f's{n % 7}', type='T') for n in range(500))"
)
LOOK = "from smoke.models import Seen; import scriba; print(Seen.objects.count(), scriba.info('smoke').counters['applied'], scriba.__file__)"


def main(folder: Path) -> None:
    url = os.environ["DATABASE_URL"]
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"DROP DATABASE IF EXISTS {DATABASE} WITH (FORCE)")
        connection.execute(f"CREATE DATABASE {DATABASE}")
    write_project(folder)
    manage(folder, "migrate", "--run-syncdb", "-v0")
    manage(folder, "check", "--database", "default")
    manage(folder, "shell", "-c", APPEND)
    manage(folder, "run_projections", "--until-caught-up")
    seen, applied, where = manage(folder, "shell", "-v0", "-c", LOOK).splitlines()[-1].split()
    assert (seen, applied) == ("500", "500"), f"{seen} rows, {applied} applied; expected 500 of each"
    assert "site-packages" in where, f"the wheel is tested, not {where}"
    print("wheel ok")


def write_project(folder: Path) -> None:
    app = folder / "smoke"
    app.mkdir(parents=True)
    (folder / "smoke_settings.py").write_text(SETTINGS)
    (app / "__init__.py").write_text("")
    (app / "models.py").write_text(MODELS)
    (app / "projections.py").write_text(PROJECTIONS)


def manage(folder: Path, *arguments: str) -> str:
    environment = {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "smoke_settings",
        "DATABASE_NAME": DATABASE,
        "PYTHONPATH": str(folder),
    }
    command = [sys.executable, "-m", "django", *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, text=True, stdout=subprocess.PIPE, check=False)
    if done.returncode:
        sys.exit(f"django {' '.join(arguments)} → {done.returncode}\n{done.stdout}")
    return done.stdout


if __name__ == "__main__":
    main(Path(sys.argv[1]))
