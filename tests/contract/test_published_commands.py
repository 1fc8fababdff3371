"""verl's published example commands with the presets of the product: which compose, and why the others do not.

``published_commands.yaml`` has the overrides that decide it. Hydra composes each in this process, and the preflight
examines it as ``verl-rhyme preflight --dry-run`` does.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from tests.conftest import examples
from verl_rhyme.checks.doctor import FAIL
from verl_rhyme.checks.preflight.checks import examine
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import ConfigError
from verl_rhyme.planning.architecture import PUBLISHED

TABLE = yaml.safe_load(Path(__file__).with_name("published_commands.yaml").read_text())
#: ``config.json`` of models whose family decides, by the beginning of their names.
FAMILIES = {
    "Qwen3-Next": {"model_type": "qwen3_next"},
    "Qwen3.5-122B": {"model_type": "qwen3_5_moe"},
    "Qwen3.5-35B": {"model_type": "qwen3_5_moe"},
    "Qwen3.5-397B": {"model_type": "qwen3_5_moe"},
    "Qwen3.5": PUBLISHED["Qwen/Qwen3.5-9B"],
    "NVIDIA-Nemotron-3-Nano": {"model_type": "nemotron_h"},
}
pytestmark = pytest.mark.slow


def arguments(row, folder, verl_knows=True):
    """Return the arguments of a command; ``verl_knows`` leaves out what verl 0.9.1 refuses in it."""
    given = row["overrides"]
    if verl_knows:
        refused = row.get("verl", ())
        given = [each for each in given if not any(name in each for name in refused)] + row.get("instead", [])
    shapes = {**{name.partition("/")[2]: shape for name, shape in PUBLISHED.items()}, **FAMILIES}
    path = folder / row["model"]
    for name, shape in shapes.items():
        if row["model"] == name or (name in FAMILIES and row["model"].startswith(name)):
            path.mkdir(parents=True)
            (path / "config.json").write_text(json.dumps(shape))
            break
    expanded = [re.sub(r"^(\+*)(actor|model|rollout)\.", r"\1actor_rollout_ref.\2.", each) for each in given]
    return [*expanded, "actor_rollout_ref.rollout.name=vllm", f"actor_rollout_ref.model.path={path}"]


def outcome(arguments):
    """Return ``composes``, or the last part of each refused key."""
    checks = examine(compose(arguments), elsewhere=True, imports=False).checks
    refused = [re.split("=| is not read", check.detail)[0].split(".")[-1] for check in checks if check.status == FAIL]
    return ", ".join(refused) or "composes"


@pytest.mark.parametrize("script", [*TABLE][:: examples(3, 1)])
def test_a_published_command_composes_or_is_refused_for_its_reason(script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # no checkpoints of another run
    row = TABLE[script]
    if "verl" in row:
        with pytest.raises(ConfigError, match="|".join(row["verl"])):
            compose([*arguments(row, tmp_path / "as published", verl_knows=False), "+rhyme=histospec"])
    if "histospec" in row:
        given = arguments(row, tmp_path)
        found = {preset: outcome([*given, f"+rhyme={preset}"]) for preset in ("histospec", "full")}
        assert found == {preset: row[preset] for preset in found}
