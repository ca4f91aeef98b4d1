"""What an audit found, for people and programs: `report.json`, `report.md`, `report.html`, pictures, a terminal."""

from hfpar.audit.report.compare import print_comparison, write_comparison
from hfpar.audit.report.storage import read_report
from hfpar.audit.report.terminal import print_report
from hfpar.audit.report.write import write_report

__all__ = ["print_comparison", "print_report", "read_report", "write_comparison", "write_report"]
