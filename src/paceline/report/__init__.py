"""What a comparison found, for people: a table in the terminal (`report.text`), one page to mail (`report.html`).

The table and the page are written from the same rows with the same formatting functions, so they cannot disagree.
"""

from paceline.report.row import Row

__all__ = ["Row"]
