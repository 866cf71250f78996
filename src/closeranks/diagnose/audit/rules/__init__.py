"""The rules. Each module registers its own on import; `catalog_rules` makes one of each entry of `catalog/unsafe`."""

from closeranks.diagnose.audit.rules import host, install, model, pair, parsers, units
from closeranks.diagnose.audit.rules.catalog_rules import from_catalog

__all__ = ["from_catalog", "host", "install", "model", "pair", "parsers", "units"]
