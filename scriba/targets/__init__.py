"""Where read models live."""

from scriba.targets.orm import OrmTarget

__all__ = ["OrmTarget"]
