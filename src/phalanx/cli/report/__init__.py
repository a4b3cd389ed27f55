"""``phalanx report``: one page of HTML about one or more runs."""

from phalanx.cli.report.command import report

__all__ = ["report"]
