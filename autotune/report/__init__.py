"""Reports: what tuning brought, set beside the baselines, as Markdown, CSV or HTML.

Importing this package loads neither pandas nor optuna.
"""

from autotune.report.write import write_reports

__all__ = ["write_reports"]
