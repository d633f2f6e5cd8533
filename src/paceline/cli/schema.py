"""`paceline schema`: the JSON schema of settings files, for editors."""

from __future__ import annotations

import json


def schema() -> None:
    """Print the JSON schema of settings files: paceline schema > settings.schema.json."""
    from paceline.settings.schema import settings_schema

    print(json.dumps(settings_schema(), indent=1))
