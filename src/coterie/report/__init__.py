"""A run or a comparison of runs as one page to look at."""

from coterie.report.page import write_report

__all__ = ["write_report"]
