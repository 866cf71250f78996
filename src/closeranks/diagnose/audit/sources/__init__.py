"""From what an operator has (files, folders, URLs, command lines) to a `Deployment`."""

from closeranks.diagnose.audit.sources.collect import SourceError, collect
from closeranks.diagnose.audit.sources.hosts import this_host

__all__ = ["SourceError", "collect", "this_host"]
