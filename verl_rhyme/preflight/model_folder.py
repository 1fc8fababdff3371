"""A model's ``config.json``, from its folder or the hub's local cache; nothing is downloaded."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_hub_id(path: str) -> bool:
    """Whether it names a repository, ``owner/name``, and no folder here."""
    return bool(_HUB_ID.fullmatch(path)) and not Path(path).exists()


def find(path: str) -> Path | None:
    """The ``config.json`` of ``actor_rollout_ref.model.path``; ``None`` where it is not on this machine."""
    local = Path(path).expanduser() / "config.json"
    if local.is_file():
        return local
    if not is_hub_id(path):
        return None
    try:
        from huggingface_hub import try_to_load_from_cache
    except ImportError:
        return None
    cached = try_to_load_from_cache(path, "config.json")
    return Path(cached) if isinstance(cached, str) else None


def read(file: Path) -> dict[str, Any]:
    """Parse it.

    Raises:
        ValueError: It is no JSON object.
    """
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{file} holds no JSON object")
    return found
