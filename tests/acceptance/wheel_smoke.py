"""What CI runs with the installed wheel, outside of the repository: a project of one file, from nothing to a row.

Usage: python wheel_smoke.py FOLDER (with DATABASE_URL set). Prints ``wheel ok``.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

PROJECT = textwrap.dedent(
    '''
    import os, sys
    from urllib.parse import parse_qs, urlsplit
    import django
    from django.conf import settings
    from django.db import connection, models

    url = urlsplit(os.environ["DATABASE_URL"])
    query = parse_qs(url.query)
    settings.configure(
        INSTALLED_APPS=["scriba", "smoke"],
        DATABASES={"default": {
            "ENGINE": "django.db.backends.postgresql", "NAME": url.path.strip("/"), "USER": url.username or "",
            "HOST": query.get("host", [url.hostname or ""])[0], "PORT": query.get("port", [str(url.port or "")])[0],
        }},
        USE_TZ=True,
    )
    django.setup()
    from django.core.management import call_command
    from smoke.models import Fact, Seen

    assert "site-packages" in __import__("scriba").__file__, "the wheel is tested, not the checkout"
    call_command("migrate", run_syncdb=True, verbosity=0)
    Fact.objects.all().delete(); Seen.objects.all().delete()
    Fact.objects.bulk_create(Fact(stream_id=f"s{n % 7}", type="Happened", data={"n": n}) for n in range(500))
    call_command("run_projections", "smoke", until_caught_up=True)
    assert Seen.objects.count() == 500, Seen.objects.count()
    print("wheel ok")
    '''
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


def main(folder: Path) -> None:
    app = folder / "smoke"
    app.mkdir(parents=True, exist_ok=True)
    (app / "__init__.py").write_text("")
    (app / "models.py").write_text(MODELS)
    (app / "projections.py").write_text(PROJECTIONS)
    (folder / "project.py").write_text(PROJECT)
    raise SystemExit(subprocess.run([sys.executable, "project.py"], cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
