"""The requirements of `make lowest`: what pyproject.toml declares, each at its lowest version.

    python tests/lowest.py > requirements.txt

The tools of the unit tests come at the versions of constraints.txt.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
TOOLS = ("httpx2", "hypothesis", "pytest", "pytest-timeout", "pytest-xdist")


def lowest(project: dict[str, object]) -> Iterator[str]:
    """`name==version` for all that the package and its extras need."""
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict) and isinstance(project["dependencies"], list)
    for declared in [*project["dependencies"], *(one for some in extras.values() for one in some)]:
        match = re.fullmatch(r"([\w-]+)>=([\w.]+)", declared)
        if match is None:
            raise SystemExit(f"{declared} declares no lowest version: write {declared}>=VERSION")
        yield f"{match[1]}=={match[2]}"


if __name__ == "__main__":
    print(*lowest(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]), sep="\n")
    pinned = (ROOT / "constraints.txt").read_text().splitlines()
    print(*(line for line in pinned if line.partition("==")[0] in TOOLS), sep="\n")
