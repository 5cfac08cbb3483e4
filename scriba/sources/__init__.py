"""Where events come from: one file per adapter. Adapters with extra dependencies load when they are asked for."""

from scriba.sources.table import TableSource, notify_appended

__all__ = ["TableSource", "notify_appended"]
