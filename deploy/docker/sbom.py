"""Print what this environment has installed as a software bill of materials (CycloneDX 1.5, JSON)."""

from __future__ import annotations

import json
import platform
from importlib.metadata import distributions


def main() -> None:
    """Print it."""
    found = {dist.metadata["Name"]: dist for dist in distributions()}
    components = [
        {
            "type": "library",
            "name": name,
            "version": dist.version,
            "purl": f"pkg:pypi/{name.lower().replace('_', '-')}@{dist.version}",
        }
        for name, dist in sorted(found.items())
    ]
    python = {"type": "platform", "name": "python", "version": platform.python_version()}
    print(
        json.dumps(
            {
                "bomFormat": "CycloneDX",
                "specVersion": "1.5",
                "version": 1,
                "metadata": {"component": {"type": "container", "name": "raftlog"}},
                "components": [*components, python],
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
