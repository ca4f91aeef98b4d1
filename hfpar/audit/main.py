"""The command line of `eval/contamination.py`."""

from __future__ import annotations

from collections.abc import Sequence

from hfpar.accelerator import current_rank, read_launch
from hfpar.config.audit_schema import AuditConfig
from hfpar.config.load import parse_audit_config
from hfpar.errors import HfparError
from hfpar.train.endings import run_to_exit_code

STOPPED = "hfpar: stopped; finished items are kept, the same command again goes on from there"


class EvidenceFound(HfparError):
    """A benchmark's evidence is what `fail_on` says."""


def main(argv: Sequence[str]) -> int:
    """Audit a checkpoint and turn every ending into an exit code.

    Args:
        argv: flags, as of `eval/contamination.py`.

    Returns:
        0; 1 where `fail_on` says so, or for a failure; 2 for what the user can mend; 130 for Ctrl-C.
    """
    return run_to_exit_code(lambda: _run(parse_audit_config(list(argv))), current_rank(), stopped=STOPPED)


def _run(config: AuditConfig) -> None:
    if config.plan:
        from hfpar.audit.planning import show_plan

        show_plan(config)
        return
    if config.compare is not None:
        from hfpar.audit.comparing import run_comparison

        reports = run_comparison(config, read_launch())
        fail_if_found(
            config,
            [
                (f"{label}: {verdict.benchmark}", verdict.level)
                for label, report in reports
                for verdict in report.verdicts
            ],
        )
        return
    from hfpar.audit.backends import audit

    report = audit(config, read_launch())
    fail_if_found(config, [(verdict.benchmark, verdict.level) for verdict in report.verdicts])


def fail_if_found(config: AuditConfig, levels: Sequence[tuple[str, str]]) -> None:
    """End with exit code 1 where the evidence is at least `fail_on`.

    Raises:
        EvidenceFound: it is.
    """
    bad = {"none": (), "some": ("some", "strong"), "strong": ("strong",)}[config.fail_on]
    found = [f"{benchmark} ({level} evidence)" for benchmark, level in levels if level in bad]
    if found:
        raise EvidenceFound(f"fail_on: {config.fail_on}; this checkpoint has seen {', '.join(found)}")
