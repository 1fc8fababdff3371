"""Composition of verl's config, with errors that name the fix."""

import pytest
from omegaconf import OmegaConf

from tests.unit.checks.preflight.world import R
from tests.unit.configs import ROOT
from verl_rhyme.checks.preflight.compose import compose, program_ends
from verl_rhyme.config import ConfigError

RECIPE = ["--config-path", str(ROOT / "recipes" / "config"), "--config-name", "qwen3_8b_grpo"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nonsense=1"], "nonsense"),
        (["trainer.save_frq=1"], "did you mean trainer.save_freq"),
        (
            ["+rhyme=histospec", f"{R}.custom.rhyme.placment.policy=x"],
            r"placment\.policy=x: unknown key; did you mean .*\.rhyme\.placement\.policy\?$",
        ),
        (["+rhyme=sorted", "rhyme.scheduling.order=0"], rf"did you mean {R}\.custom\.rhyme\.scheduling\.order\?$"),
        (
            [
                *RECIPE,
                "rhyme=histospec",
                "rhyme.max_staleness=2",
            ],  # not only the last is below the key of hydra's error
            rf"^rhyme\.max_staleness=2: .* did you mean {R}\.custom\.rhyme\.max_staleness\?$",
        ),
        ([f"{R}.rhyme.enable=false"], rf"did you mean {R}\.custom\.rhyme\.enable\?$"),
        (["ryhme=full"], r"^ryhme=full: unknown key; did you mean \+rhyme=full\?$"),
        ([f"{R.removesuffix('rollout')}actor.model_engine=dp"], r"unknown key; did you mean model_engine=dp\?$"),
        (["model_engine=nope"], "Available options in 'model_engine': dp; megatron; [^/]*$"),
        (
            ["trainer.default_local_dir=A b=c/ckpt"],
            "^trainer.default_local_dir=A b=c/ckpt: mismatched input '='.*quote",
        ),
        (["--config-dir", "/nowhere"], "/nowhere"),
        (["--config-path", "/nowhere", "--config-name", "x"], "--config-path /nowhere: no such folder"),
        (["--bogus", "x=1"], "bogus"),
        (["trainer.project_name=${nothing.here}"], "nothing.here"),
    ],
)
def test_errors_of_composition_have_a_reason(arguments, words):
    with pytest.raises(ConfigError, match=words):
        compose(arguments)


OWN = "defaults:\n  - ppo_trainer\n  - rhyme: sorted\n  - _self_\n"


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("a: [", "did not find expected|expected the node content"),
        ("", "--config-name mine: no actor_rollout_ref, data, trainer in it; start its defaults with `- ppo_trainer`"),
        (b"a: \xd2\xff", "mine"),
        (OWN, "Could not load 'ppo_trainer'; add `hydra: {searchpath: [pkg://verl.trainer.config]}` to mine.yaml"),
    ],
)
def test_errors_of_a_users_yaml_have_a_reason(tmp_path, text, problem):
    (tmp_path / "mine.yaml").write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError) as error:
        compose(["--config-path", str(tmp_path), "--config-name", "mine"])
    assert any(words in str(error.value) for words in (problem, *problem.split("|"))), error.value


def test_a_users_yaml_selects_a_preset_as_documented(tmp_path):
    """The two ways of ``recipes/README.md``, from a folder with a space in its name."""
    folder = tmp_path / "my configs"
    folder.mkdir()
    (folder / "mine.yaml").write_text(OWN)
    (folder / "alone.yaml").write_text(f"hydra:\n  searchpath: [pkg://verl.trainer.config]\n{OWN}")
    for way, name in (("--config-dir", "mine"), ("--config-path", "alone")):
        arguments = [way, str(folder), "--config-name", name]
        config = compose([*arguments, f"{R}.name=vllm"])
        assert OmegaConf.select(config, f"{R}.custom.rhyme.scheduling.refill") == "when_empty"
        assert config.trainer.v1.trainer_mode == "sync"
        assert compose([*arguments, f"{R}.name=vllm", "rhyme=stream"]).trainer.v1.trainer_mode == "separate_async"


@pytest.mark.parametrize(
    ("arguments", "begin"),
    [
        (["python", "-m", "verl.trainer.main_ppo", "a=1"], 3),
        (["/usr/bin/python3", "verl/trainer/main_ppo.py", "a=1"], 2),
        (["a=1", "trainer.experiment_name=main_ppo"], None),
        (["--config-name", "main_ppo", "a=/x/main_ppo.py"], None),
    ],
)
def test_the_program_of_a_whole_command_is_left_out(arguments, begin):
    assert program_ends(arguments) == begin
