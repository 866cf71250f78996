"""Audit: what in a deployment is known to wedge, leak or corrupt, before it does.

`sources` turn flags, unit files, `/server_info`, model folders and installed packages into a `Deployment`; `rules`
are pure functions of it; `report` prints what they found. `closeranks audit` is its command; `docs/audit.md` shows how
to add a rule.
"""

from closeranks.diagnose.audit.judge import audit
from closeranks.diagnose.audit.model import Deployment, Engine, Finding, Report, Unjudged

__all__ = ["Deployment", "Engine", "Finding", "Report", "Unjudged", "audit"]
