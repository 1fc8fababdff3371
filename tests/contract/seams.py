"""Objects of verl and vLLM that verl-rhyme overrides, calls or relies on, by the feature that breaks if they change.

``seams.json`` has each as ``module:qualname`` with the hash of its source; an object without source must exist. With a
new release, read the sources of the objects whose hash differs, adapt verl-rhyme, and write the new hashes:
``python tests/contract/seams.py``.
"""

from __future__ import annotations

import functools
import importlib
import json
from pathlib import Path

from verl_rhyme.patches.core import PatchRefusedError, source_hash

FILE = Path(__file__).with_suffix(".json")

#: Hash by object, by feature.
SEAMS: dict[str, dict[str, str]] = json.loads(FILE.read_text())


def current(target: str) -> str:
    """Return the first digits of the hash of an object's source, empty if it has none; AttributeError without it."""
    module, _, qualname = target.partition(":")
    found = functools.reduce(getattr, qualname.split("."), importlib.import_module(module))
    try:
        return source_hash(found)[:16]
    except PatchRefusedError:
        return ""


if __name__ == "__main__":
    new = {feature: {target: current(target) for target in targets} for feature, targets in SEAMS.items()}
    FILE.write_text(json.dumps(new, indent=2) + "\n")
