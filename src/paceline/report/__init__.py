"""Reports of a comparison: a table for the terminal (`report.text`) and one HTML page (`report.html`).

Both are written from the same rows and columns, so they cannot disagree.
"""

from paceline.report.row import Row

__all__ = ["Row"]
