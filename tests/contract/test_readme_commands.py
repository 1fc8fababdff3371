"""The quickstart's commands for the run scripts train one or two epochs; wrong ones are refused in a line."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import ONLY_SLOW

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # each starts a script with several Python processes

#: Of the GPU recipes' commands only those with SMOKE=1 run here.
COMMANDS = [
    command
    for line in (ROOT / "docs" / "quickstart.md").read_text().splitlines()
    if (command := line.partition("#")[0].strip())
    and line.startswith("    ")
    and re.search(r"\bbash recipes/run_", command)
    and ("run_tiny_cpu" in command or "SMOKE=1" in command)
]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Checkout with an empty ``runs/``."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("recipes", "examples", "requirements", "verl_rhyme"):
        (folder / name).symlink_to(ROOT / name)
    return folder


def start(checkout, command, **variables):
    names = ("RHYME", "STALENESS", "MODE", "MODEL", "ENGINE", "RUN_DIR", "DRY_RUN", "COMPARE", "SMOKE")
    environment = {name: value for name, value in os.environ.items() if name not in names}
    environment |= {"SKIP_BOOTSTRAP": "1", "PROMPTS": "16", **variables}
    return subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=1200
    )


@ONLY_SLOW
@pytest.mark.timeout(10_000)
def test_the_commands_work_one_after_another(checkout):
    assert len(COMMANDS) >= 8
    for command in COMMANDS:
        result = start(checkout, re.sub(r"EPOCHS=\d+", "EPOCHS=2", command), EPOCHS="1")
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        assert "already finished" not in result.stdout, command
        if "run_tiny_cpu" in command and "DRY_RUN" not in command:
            summaries = [word for word in result.stdout.split() if word.endswith("summary.json")]
            summary = json.loads(Path(summaries[-1]).read_text())
            assert ("runs" in summary) == ("COMPARE=1" in command), command


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ("RHYME=off MODE=separate_async {}", "needs our relay for weights, which RHYME=off"),
        ("MODEL=nope {}", "MODEL=nope is neither qwen2, llama, agent, smollm2 nor a model folder"),
        ("EPOCHS=0 {}", "EPOCHS=0 is below 1"),
        (
            "RUN_DIR=/dev/null/run {}",
            "/dev/null/run/checkpoints cannot be written -> set it to a folder that you can write",
        ),
        ("DRY_RUN=1 {} trainer.save_frq=2", "did you mean trainer.save_freq?"),
    ],
)
def test_a_wrong_input_gives_one_line(checkout, tmp_path, settings, message):
    result = start(checkout, settings.format("bash recipes/run_tiny_cpu.sh"), RUN_DIR=str(tmp_path / "run"))
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing was written"
