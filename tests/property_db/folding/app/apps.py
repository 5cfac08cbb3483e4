"""Models of every shape that folding has to get right, and what of them Django cannot declare."""

from __future__ import annotations

from django.apps import AppConfig
from django.db import connections
from django.db.models.signals import post_migrate

#: Run once per database, after the tables are there.
EXTRAS = """
CREATE OR REPLACE FUNCTION folding_watch() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO folding_watchlog (said) VALUES (TG_OP || ' ' || coalesce(NEW.id, OLD.id) || ' ' || coalesce(NEW.note, ''));
    RETURN NULL;
END $$;
CREATE OR REPLACE TRIGGER folding_watch AFTER INSERT OR UPDATE OR DELETE ON folding_watched
    FOR EACH ROW EXECUTE FUNCTION folding_watch();
ALTER TABLE folding_strictchild DROP CONSTRAINT IF EXISTS strict_parent;
ALTER TABLE folding_strictchild ADD CONSTRAINT strict_parent FOREIGN KEY (parent_id) REFERENCES folding_strictparent (id);
ALTER TABLE folding_strictchild ALTER COLUMN parent_id DROP NOT NULL;
ALTER TABLE folding_numbered ADD COLUMN IF NOT EXISTS seq bigserial;
"""


class FoldingConfig(AppConfig):
    name = "tests.property_db.folding.app"
    label = "folding"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        post_migrate.connect(_add_extras, sender=self)


def _add_extras(using: str, plan: object = None, **_kwargs: object) -> None:
    if not plan:
        return  # a flush between tests
    with connections[using].cursor() as cursor:
        cursor.execute(EXTRAS)
