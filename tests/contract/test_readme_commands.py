"""The quickstart's commands for the run scripts, one after another in one checkout, in the order of the page.

Scripts, folders, verl's configuration and reports are real. A stand-in replaces training and leaves a training's files.
With RHYME_SLOW=1 all commands run twice: with the stand-in, and with one or two epochs of training.
"""

import json
import os
import re
import subprocess
import sys
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

#: Replaces ``python``; only training and the making of puzzles are stand-ins.
PYTHON = f"""#!{sys.executable}
import json, os, pathlib, sys
module = sys.argv[2] if sys.argv[1:2] == ["-m"] else ""
if module in ("examples.tiny_world.data", "examples.tiny_world.untie", "examples.smollm2.data"):
    sys.exit()
if module not in ("verl_rhyme.observability.progress", "verl.trainer.main_ppo"):
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
from verl_rhyme.checks.preflight.compose import compose
arguments = sys.argv[sys.argv.index("verl.trainer.main_ppo") + 1 :]
config = compose(arguments)
folder = pathlib.Path(config.trainer.default_local_dir)
steps = config.trainer.total_training_steps or 4 * config.trainer.total_epochs
found = folder / "latest_checkpointed_iteration.txt"
begin = int(found.read_text()) if found.exists() else 0
print("TRAINED", json.dumps([str(folder), begin, steps]))
(folder / f"global_step_{{steps}}").mkdir(parents=True)
found.write_text(str(steps))
run = folder.parent
with open(run / "metrics.jsonl", "w") as file:
    for step in range(begin + 1, steps + 1):
        data = {{"training/epoch": (step - 1) // 4, "critic/score/mean": 0.5, "timing_s/gen": 1.0}}
        file.write(json.dumps({{"step": step, "data": data}}) + "\\n")
"""


def test_the_quickstart_has_the_commands():
    assert len([command for command in COMMANDS if "run_tiny_cpu" in command]) >= 8
    assert any("SMOKE=1" in command for command in COMMANDS)


@pytest.fixture
def checkout(tmp_path):
    """Checkout with an empty ``runs/``, and a ``python`` that does not train."""
    folder = tmp_path / "checkout"
    folder.mkdir()
    for name in ("recipes", "examples", "requirements", "verl_rhyme"):
        (folder / name).symlink_to(ROOT / name)
    programs = folder / "programs"
    programs.mkdir()
    (programs / "python").write_text(PYTHON)
    (programs / "python").chmod(0o755)
    return folder


def start(checkout, command, trains=False, **variables):
    environment = {**os.environ, "SKIP_BOOTSTRAP": "1", "SKIP_PREFLIGHT": "1", "PROMPTS": "16", **variables}
    for name in ("RHYME", "STALENESS", "MODE", "MODEL", "ENGINE", "RUN_DIR", "DRY_RUN", "COMPARE", "SMOKE"):
        environment.pop(name, None)
    environment |= variables
    if trains:
        environment["EPOCHS"] = "1"
        command = re.sub(r"EPOCHS=\d+", "EPOCHS=2", command)
    else:
        environment["PATH"] = f"{checkout / 'programs'}:{environment['PATH']}"
    return subprocess.run(
        ["bash", "-c", command], cwd=checkout, env=environment, capture_output=True, text=True, timeout=1200
    )


def trainings(result):
    """Return (checkpoint folder, first step, last step) of each training that the command started."""
    return [json.loads(line.removeprefix("TRAINED ")) for line in result.stdout.splitlines() if "TRAINED " in line]


def tree(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@ONLY_SLOW
@pytest.mark.timeout(10_000)
@pytest.mark.parametrize("trains", [False, True])
def test_the_commands_work_one_after_another(checkout, trains):
    seen = {}
    for command in COMMANDS:
        before = tree(checkout / "runs") if "DRY_RUN" in command else None
        result = start(checkout, command, trains)
        assert result.returncode == 0, f"{command}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        assert "already finished" not in result.stdout, command
        if before is not None:
            assert tree(checkout / "runs") == before
            continue
        if not trains:
            found = trainings(result)
            assert len(found) == (2 if "COMPARE=1" in command else 1), command
            for folder, begin, _ in found:
                assert begin == 0, f"{command} resumes the run of {seen.get(folder)}"
                assert folder not in seen
                seen[folder] = command
        if "run_tiny_cpu" in command:
            summaries = [line for line in result.stdout.replace("\n/", "\n /").split() if line.endswith("summary.json")]
            summary = json.loads(Path(summaries[-1]).read_text())
            words = dict(word.split("=", 1) for word in command.partition(" bash ")[0].split() if "=" in word)
            name = words.get("RHYME", "histospec") + (f"-k{words['STALENESS']}" if "STALENESS" in words else "")
            assert list(summary.get("runs", [summary["run"]] if "run" in summary else [])) == (
                ["off", "histospec"] if "COMPARE=1" in command else [name]
            )


FIRST = next(command for command in COMMANDS if "run_tiny_cpu" in command)


@pytest.fixture
def trained(checkout):
    """Folder of the first command's run."""
    assert start(checkout, FIRST).returncode == 0
    return checkout / "runs" / "tiny_cpu" / "histospec-qwen2-fsdp-sync"


def test_a_second_start_ends_or_resumes(checkout, trained):
    (trained / "summary.json").unlink()
    # The data file, which gives the number of steps, is a stand-in, too.
    again = start(checkout, f"{FIRST} trainer.total_training_steps=20")
    assert again.returncode == 0
    assert "already finished: 20 of 20 steps" in again.stdout
    assert not trainings(again)
    assert json.loads((trained / "summary.json").read_text())["run"] == "histospec"
    further = start(checkout, f"{FIRST} trainer.total_training_steps=24")
    assert trainings(further) == [[str(trained / "checkpoints"), 20, 24]]
    assert "resuming after step 20 of 24" in further.stdout


def test_each_number_of_engines_has_a_folder(checkout):
    folders = set()
    for replicas in ("1", "2", "3"):
        variables = {"MODE": "separate_async", "REPLICAS": replicas, "DRY_RUN": "1"}
        done = start(checkout, "bash recipes/run_tiny_cpu.sh", **variables)
        (folder,) = [line.split()[-1] for line in done.stdout.splitlines() if "default_local_dir:" in line]
        folders.add(Path(folder).parent.name)
    single = "histospec-qwen2-fsdp-separate_async"
    assert folders == {single, f"{single}-2_replicas", f"{single}-3_replicas"}


TREE = "actor_rollout_ref.rollout.custom.rhyme"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (f"RHYME=full {TREE}.max_staleness=-1", "max_staleness must be null, or at least 0"),
        ("RHYME=off MODE=separate_async", "needs our relay for weights, which RHYME=off"),
        ("MODEL=nope", "MODEL=nope is neither qwen2, llama, smollm2 nor a model folder"),
        ("EPOCHS=0", "EPOCHS=0 is below 1"),
        ("PROMPTS=3", "PROMPTS=3 is below 16, a batch of data.train_batch_size"),
        ("data.train_batch_size=0", "train_batch_size must be a whole number of at least 1, not 0"),
        ("RHYME=sorted COMPARE=1", "COMPARE=1 compares off and histospec; drop RHYME=sorted"),
        ("PEOPLE=abc", "PEOPLE='abc' is not a list of numbers"),
        ("SEED=-1", "SEED=-1 is below 0"),
        ("RUN_DIR=/dev/null/run", "cannot write to /dev/null/run/checkpoints (Not a directory)"),
        ("DRY_RUN=1 trainer.save_frq=2", "did you mean trainer.save_freq?"),
        ("data.train_batch_size=10", "data.train_batch_size=10 is not a multiple of ppo_mini_batch_size=16"),
    ],
)
def test_a_wrong_input_gives_one_line(tmp_path, settings, message):
    environment = {**os.environ, "SKIP_BOOTSTRAP": "1", "RUN_DIR": str(tmp_path / "run")}
    words = settings.split()
    environment |= dict(word.split("=", 1) for word in words if word.split("=")[0].isupper())
    overrides = [word for word in words if not word.split("=")[0].isupper()]
    script = ROOT / "recipes" / "run_tiny_cpu.sh"
    result = subprocess.run(["bash", script, *overrides], env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode in (1, 2)
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir()), "nothing was written"
