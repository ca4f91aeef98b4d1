"""Where the audited model runs."""

from __future__ import annotations

from hfpar.accelerator import Launch
from hfpar.audit.results import Report
from hfpar.config.audit_schema import AuditConfig


def audit(config: AuditConfig, launch: Launch) -> Report:
    """Audit one checkpoint, in this process or behind a server.

    Raises:
        HfparError: anything that the user can mend; what was finished is kept.
    """
    if config.backend == "openai":
        from hfpar.audit.server_audit import run_server_audit

        return run_server_audit(config, launch.world_size)
    from hfpar.audit.run import run_audit

    return run_audit(config, launch)
