"""Bad input: one clear error before anything heavy starts."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from omegaconf import OmegaConf

from verl_rhyme.checks import doctor, run_lock, startup
from verl_rhyme.checks.preflight import config_checks, user_code
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import ConfigError, config_tree

RHYME = "actor_rollout_ref.rollout.custom.rhyme"


def config(tmp_path, **rollout):
    """As much of verl's config as the checks of the rhyme tree read; all of it right."""
    agent = {"agent_loop_manager_class": "verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"}
    rollout = {"name": "vllm", "custom": {"rhyme": {}}, "agent": agent, **rollout}
    return OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": rollout, "actor": {}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        }
    )


def pipeline_config(tmp_path, **rollout):
    agent = {"agent_loop_manager_class": "verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"}
    rollout = {"agent": agent, "calculate_log_probs": True, "scheduling_policy": "priority", **rollout}
    return config(tmp_path, custom={"rhyme": {"max_staleness": 1}}, **rollout)


@pytest.fixture(autouse=True)
def verl(monkeypatch):
    monkeypatch.setenv("VERL_PLATFORM", "cpu")
    import verl

    return verl


@pytest.mark.parametrize("package", ["verl", "vllm"])
def test_wrong_version(tmp_path, monkeypatch, package):
    monkeypatch.setattr(
        doctor, "installed_version", lambda name: "0.1.2" if name == package else doctor.SUPPORTED[name]
    )
    with pytest.raises(ConfigError) as caught:
        startup.check(config(tmp_path))
    assert f"{package} 0.1.2" in str(caught.value)
    assert f"{package}=={doctor.SUPPORTED[package]}" in str(caught.value)


@pytest.mark.slow
def test_another_release_of_verl_is_refused_by_its_own_command(tmp_path):
    """No patch of verl is applied to it, so that none may be needed to refuse it. Earlier releases load no plugins."""
    other = tmp_path / "verl-0.8.0.dist-info"
    other.mkdir()
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: verl\nVersion: 0.8.0\n")
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "+rhyme=histospec", f"{ROLLOUT}.name=vllm"]
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "VERL_USE_EXTERNAL_PLUGINS": "none"}
    env.pop("VERL_PLATFORM")  # the plugin registers it
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "verl 0.8.0 is installed, but verl-rhyme supports verl 0.9.1: pip install" in done.stderr
    assert done.stderr.count("REFUSED") <= 1, done.stderr


ROLLOUT, ACTOR = "actor_rollout_ref.rollout", "actor_rollout_ref.actor"
MODEL = Path(__file__).parents[2] / "examples/tiny_world/models/qwen2"
ROW = {"prompt": [{"role": "user", "content": "a"}], "data_source": "x", "reward_model": {"ground_truth": "b"}}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Arguments of a run that could start, without a preset."""
    folder = tmp_path_factory.mktemp("run")
    pq.write_table(pa.Table.from_pylist([ROW] * 16), folder / "train.parquet")
    (folder / "reward.py").write_text("def compute_score(**arguments): return 0.0\n")
    return [
        f"data.train_files={folder}/train.parquet",
        f"data.val_files={folder}/train.parquet",
        f"reward.custom_reward_function.path={folder}/reward.py",
        f"actor_rollout_ref.model.path={MODEL}",
        f"trainer.default_local_dir={folder}/checkpoints",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        "trainer.save_freq=-1",
        "trainer.logger=console",
        "algorithm.adv_estimator=grpo",
        "data.train_batch_size=16",
        "data.max_prompt_length=64",
        "data.max_response_length=64",
        f"{ACTOR}.ppo_mini_batch_size=16",
        f"{ACTOR}.ppo_micro_batch_size_per_gpu=4",
        f"{ROLLOUT}.name=vllm",
        f"{ROLLOUT}.n=4",
        f"{ROLLOUT}.tensor_model_parallel_size=1",
        f"{ROLLOUT}.gpu_memory_utilization=0.1",
        f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu=4",
    ]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([f"+{RHYME}.drafting.max_tokens=16"], "add +rhyme=histospec"),
        (["+rhyme=histospec", f"{RHYME}.drafting.max_tokns=16"], f"did you mean {RHYME}.drafting.max_tokens?"),
        (["+rhyme=full", "+max_staleness=2"], f"max_staleness is not read: did you mean {RHYME}.max_staleness?"),
        (["+ryhme=full"], "ryhme=full is not read: did you mean +rhyme=full?"),
        ([f"+{ROLLOUT}.custom.ryhme.enable=true"], f"custom.ryhme.enable is not read: did you mean {RHYME}.enable?"),
        (["+rhyme=full", f"{ROLLOUT}.name=sglang"], f"rhyme drafts and schedules in vLLM only -> set {ROLLOUT}.name="),
        (
            [
                "+rhyme=histospec",
                "data.prompt_key=question",
                "reward.custom_reward_function.name=score",
                f"{RHYME}.history.dir=/proc/nope",
                "trainer.logger=swanlab",
            ],
            [
                "no column 'question'",
                "reward.py has no score",
                "the history cannot be kept in /proc/nope",
                "pip install swanlab",
            ],
        ),
    ],
)
@pytest.mark.xdist_group("forks")
def test_a_users_own_command_is_refused_with_one_line_a_fault_before_ray_starts(forks, tmp_path, run, overrides, words):
    preset = [each for each in overrides if each.startswith("+rhyme=")]
    others = [each for each in overrides if each not in preset]
    keys = {each.partition("=")[0] for each in others}
    arguments = [each for each in run if each.partition("=")[0] not in keys]
    done = forks.main_ppo(*preset, *arguments, *others, cwd=tmp_path)
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "verl-rhyme: " in line and "warning" not in line]
    lines = [line for line in lines if "data.val_files" not in line]  # it has the fault of data.train_files
    expected = [words] if isinstance(words, str) else words
    assert len(lines) == len(expected)
    for each in expected:
        assert [line for line in lines if each in line]
    assert not {"Traceback", "Started a local Ray instance"} & set(done.stderr.split("\n")), done.stderr
    assert "ray init kwargs" not in done.stdout


@pytest.mark.xdist_group("forks")
def test_a_folder_in_use_or_of_another_run_is_refused_before_ray_starts(forks, tmp_path, run):
    def refusal():
        done = forks.main_ppo("+rhyme=histospec", *run, f"trainer.default_local_dir={tmp_path}", cwd=tmp_path)
        assert done.returncode == 1
        [line] = [line for line in done.stderr.splitlines() if line.startswith("verl-rhyme: ")]
        return line

    other = run_lock.take(tmp_path, 123)
    assert re.search(r" is in use by process 123 on .* set another folder", refusal())
    os.close(other)
    (tmp_path / "run.json").write_text('{"run": "sorted"}')
    assert "belongs to another run: run sorted there, histospec in this run -> set another folder" in refusal()


def main(config):
    """The user's own."""


def test_only_runs_with_rhyme_lock_their_folder(tmp_path):
    folder = tmp_path / "checkpoints"
    tree = config(tmp_path)
    tree.trainer.default_local_dir = str(folder)
    other = run_lock.take(folder, 123)
    for theirs in ({"enable": False}, None):
        tree.actor_rollout_ref.rollout.agent.agent_loop_manager_class = None
        tree.actor_rollout_ref.rollout.custom = {"rhyme": theirs} if theirs else {}
        startup.begin(tree, main)
    os.close(other)
    tree = config(tmp_path)
    tree.trainer.default_local_dir = str(folder)
    startup.begin(tree, main)
    assert run_lock.user(folder)


def test_a_run_is_checked_and_locked_once(tmp_path, monkeypatch):
    """In its command, and where verl makes the trainer, in another process and with a copy of the config."""
    tree, checked = config(tmp_path), []
    tree.trainer.default_local_dir = str(tmp_path)
    monkeypatch.setattr(startup, "check", lambda config, in_task: checked.append(in_task))
    OmegaConf.set_struct(tree, True)
    startup.begin(tree, main)
    copy = OmegaConf.create(OmegaConf.to_container(tree))
    startup.begin(copy)
    assert checked == [False]
    os.close(run_lock._held.pop(tmp_path))  # the command has ended; its config was kept
    startup.begin(copy)
    assert checked == [False, True]
    os.close(run_lock._held.pop(tmp_path))
    other = run_lock.take(tmp_path, 123)
    with pytest.raises(ConfigError, match="is in use by process 123 "):
        startup.begin(copy)
    os.close(other)


@pytest.mark.xdist_group("forks")
def test_a_main_without_hydra_is_checked_where_verl_makes_the_trainer(forks, tmp_path, run):
    code = f"""
from verl.trainer.ppo.v1 import get_trainer_cls
from verl_rhyme.checks.preflight.compose import compose
from verl_rhyme.config import ConfigError
config = compose(["+rhyme=histospec", *{run!r}, "data.train_batch_size=6"])
try:
    get_trainer_cls("sync")(config=config)
except ConfigError as error:
    print(error)
"""
    assert forks.python(code).stdout.startswith("batches: data.train_batch_size=6 is not")


#: As in recipes for verl's first trainer: the module of the main imports the class.
OLD_MAIN = """
import sys, hydra, ray, verl
from pathlib import Path
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

class RayMineTrainer(RayPPOTrainer):
    pass

del RayPPOTrainer
{more}

folder = str(Path(verl.__file__).parent / "trainer/config")

@hydra.main(config_path=folder, config_name="ppo_trainer", version_base=None)
def main(config):
    print("it starts")

sys.argv = ["main_mine", *{arguments!r}]
try:
    main()
except SystemExit as end:
    print(end)
"""


@pytest.mark.xdist_group("forks")
@pytest.mark.parametrize(
    ("more", "rhyme", "printed"),
    [
        ("", "+rhyme=full", "verl-rhyme: this command trains with RayMineTrainer, but rhyme extends verl's V1 trainer"),
        ("RayMineTrainer = ray.remote(RayMineTrainer)", "+rhyme=full", "trains with RayMineTrainer"),
        ("", "+rhyme=off", "it starts"),
        ("del RayMineTrainer", "+rhyme=histospec", "it starts"),
    ],
)
def test_a_main_with_verls_first_trainer_is_refused_before_ray_starts(forks, tmp_path, run, more, rhyme, printed):
    arguments = [rhyme, *run, f"trainer.default_local_dir={tmp_path}"]
    assert printed in forks.python(OLD_MAIN.format(more=more, arguments=arguments)).stdout


def test_verls_other_mains_are_not_its_v1_trainer():
    from verl.experimental.one_step_off_policy import main_ppo as other
    from verl.trainer import main_ppo

    assert user_code.old_trainer(other.main) == "verl.experimental.one_step_off_policy.main_ppo.main"
    assert user_code.old_trainer(main_ppo.main) is None
    assert user_code.old_trainer(main) is None


JOBS = """
import runpy, sys, ray
from hydra.errors import HydraException
def init(*arguments, **options):
    print("a job starts Ray")
    raise {error}
ray.init = init
sys.argv = ["main_ppo", *{arguments!r}]
del sys.modules["verl.trainer.main_ppo"]
try:
    runpy.run_module("verl.trainer.main_ppo", run_name="__main__", alter_sys=True)
except (SystemExit, KeyboardInterrupt) as end:
    print(getattr(end, "code", ""), file=sys.stderr)
"""
OF_THE_RUN = 'HydraException("of the run")'


@pytest.mark.xdist_group("forks")
@pytest.mark.parametrize(
    ("overrides", "started", "words"),
    [
        (["trainer.total_epochs=1,2"], 1, "is the folder of an earlier job of this command"),
        (["trainer.default_local_dir=FOLDER/${trainer.total_epochs}", "trainer.total_epochs=1,2"], 2, "of the run"),
        ([f"{RHYME}.drafting.max_tokns=1,2"], 0, f"did you mean {RHYME}.drafting.max_tokens?"),
    ],
)
def test_each_job_of_a_multirun_is_checked_and_has_its_own_folder(forks, tmp_path, run, overrides, started, words):
    folder = f"trainer.default_local_dir={tmp_path}"
    others = [each.replace("FOLDER", str(tmp_path)) for each in overrides]
    arguments = ["--multirun", "+rhyme=histospec", *run, folder, *others, f"hydra.sweep.dir={tmp_path}/sweep"]
    done = forks.python(JOBS.format(arguments=arguments, error=OF_THE_RUN))
    assert done.stdout.count("a job starts Ray") == started
    assert words in done.stderr
    assert len(list(tmp_path.rglob("run.lock"))) == started


@pytest.mark.xdist_group("forks")
def test_an_error_of_hydra_in_the_run_itself_is_no_wrong_option(forks, tmp_path, run):
    folder = f"trainer.default_local_dir={tmp_path}"
    done = forks.python(JOBS.format(arguments=["+rhyme=histospec", *run, folder], error=OF_THE_RUN))
    assert "a job starts Ray" in done.stdout
    assert "of the run" in done.stderr
    assert "verl-rhyme: of the run" not in done.stderr


@pytest.mark.xdist_group("forks")
def test_a_command_without_faults_starts_and_says_how_to_resume(forks, tmp_path, run):
    done = forks.python(JOBS.format(arguments=["+rhyme=histospec", *run], error="KeyboardInterrupt"))
    assert "verl-rhyme: interrupted before the first checkpoint in " in done.stderr
    assert "the same command starts again" in done.stderr


OWN_MANAGERS = """
from verl.trainer.ppo.v1.agent_loop_tq import AgentLoopManagerTQ
from verl_rhyme.agent_loop.agent_loop import RhymeAgentLoopManager, SessionAgentLoopManager

class Foreign(AgentLoopManagerTQ): ...
class Drafting(RhymeAgentLoopManager): ...
class Sorted(SessionAgentLoopManager): ...
"""


@pytest.mark.parametrize(
    ("build", "name", "told"),
    [
        (config, "Drafting", None),
        (config, "Foreign", "Foreign does not derive from verl_rhyme.agent_loop.agent_loop.RhymeAgentLoopManager"),
        (pipeline_config, "Sorted", None),
        (pipeline_config, "Drafting", "does not derive from verl_rhyme.agent_loop.agent_loop.SessionAgentLoopManager"),
    ],
)
def test_an_agent_loop_manager_of_ones_own(tmp_path, monkeypatch, build, name, told):
    (tmp_path / "own_managers.py").write_text(OWN_MANAGERS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "own_managers", raising=False)
    tree = build(tmp_path, agent={"agent_loop_manager_class": f"own_managers.{name}"})
    found = [str(each) for each in config_checks.agent_loops(tree, config_tree.from_verl(tree))]
    assert not found if told is None else told in found[0]


def test_engines_get_the_length_of_drafts_from_the_start(run, verl):
    """Also in the type of verl's servers; the run's own option stays, and with it the run's name."""
    from verl.utils.config import omega_conf_to_dataclass

    config = compose(["+rhyme=histospec", *run, "actor_rollout_ref.model.lora_rank=8"])
    startup.check(config)
    rollout = config.actor_rollout_ref.rollout
    assert config_tree.chosen_tokens(rollout) == config_tree.chosen_tokens(omega_conf_to_dataclass(rollout)) == 31
    assert config_tree.from_verl(config).drafting.max_tokens == 32
