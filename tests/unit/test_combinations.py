"""What is refused: each row of the table, the document that shows it, and the run scripts, which read the same list."""

from __future__ import annotations

import itertools
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from verl_rhyme import combinations, config_tree
from verl_rhyme.arms import arm_name
from verl_rhyme.config import CONFIG_PATH

ROOT = Path(__file__).parents[2]
SYSTEMS = combinations.systems()
MODES = ("sync", "colocate_async", "separate_async", "my_async")


def config(group: str, *changes: str) -> Any:
    """As much of verl's config as the table looks at, with a group of ours; ``off`` is none."""
    tree = OmegaConf.create(
        {
            "actor_rollout_ref": {"rollout": {"name": "vllm", "calculate_log_probs": True}, "actor": {}},
            "trainer": {"use_v1": True, "v1": {"trainer_mode": "sync"}},
        }
    )
    chain = ["histospec", "sorted", "histopipe", "stream"]  # each builds on the one before
    chain = [*chain[:2], "full"] if group == "full" else chain[: chain.index(group) + 1] if group in chain else []
    for name in chain:
        tree.merge_with(OmegaConf.load(ROOT / "verl_rhyme" / "conf" / "rhyme" / f"{name}.yaml"))
    for change in changes:
        key, _, value = change.partition("=")
        OmegaConf.update(tree, key, OmegaConf.create(f"value: {value}").value, force_add=True)
    return tree


def refused(tree: Any) -> list[combinations.Refusal]:
    return list(combinations.refusals(tree, config_tree.from_verl(tree)))


R = "actor_rollout_ref.rollout"
E = f"{R}.engine_kwargs.vllm"
#: Folders with a ``config.json`` each, of the fields that count here.
MODELS = Path(__file__).with_name("models")
APART = ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=1"]
#: A config for each row of the table, in its order, and words of what is told.
CASES = [
    ("histospec", [f"{R}.name=sglang"], [f"{R}.name=sglang", "vllm only", f"set {R}.name=vllm"]),
    ("histospec", [f"{R}.disaggregation.enabled=true"], [f"{R}.disaggregation.enabled=true"]),
    ("histospec", ["trainer.use_v1=false"], ["trainer.use_v1=false", "V1 trainer"]),
    (
        "histospec",
        [f"{E}.speculative_config={{method: ngram}}"],
        [f"{E}.speculative_config with", f"{CONFIG_PATH}.drafting.enable=true", "=false"],
    ),
    ("full", [f"{E}.spec_method=ngram"], [f"{E}.spec_method=ngram with", "drafts in one way"]),
    ("full", [f"{E}.spec_model=small"], [f"{E}.spec_model=small with", "drafts in one way"]),
    ("full", [f"{E}.spec_tokens=4"], [f"{E}.spec_tokens=4 with", "drafts in one way"]),
    (
        "histospec",
        [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=true"],
        ["mtp.enable_rollout=true with", "drafts in one way", "set actor_rollout_ref.model.mtp.enable_rollout=false"],
    ),
    ("histospec", [f"{E}.async_scheduling=true"], ["async_scheduling=true with", "before its drafts are known"]),
    ("histospec", [f"{E}.scheduler_cls=my.Scheduler"], ["scheduler_cls=my.Scheduler with", "synchronous scheduler"]),
    ("histospec", [f"{E}.logits_processors=[my.Processor]"], ["logits_processors with", "drafted positions"]),
    ("histospec", [f"{E}.enable_dbo=true"], ["enable_dbo=true with", "micro-batches"]),
    ("histospec", [f"{E}.ubatch_size=2"], ["ubatch_size=2 with", "micro-batches"]),
    ("histospec", [f"{E}.diffusion_config={{canvas_length: 8}}"], ["diffusion_config with", "next token"]),
    ("sorted", [f"{E}.worker_extension_cls=my.Extension"], ["worker_extension_cls=my.Extension: ", "own extension"]),
    (
        "sorted",
        [f"{E}.kv_transfer_config={{kv_role: kv_both}}"],
        ["kv_transfer_config: ", "prefill and decoding apart"],
    ),
    ("sorted", [f"{E}.config=vllm.yaml"], ["vllm.config=vllm.yaml: ", "cannot be checked"]),
    ("sorted", [f"{E}.tensor_parallel_size=2"], ["vllm.tensor_parallel_size=2 with", "tensor_model_parallel_size"]),
    ("full", [f"{E}.pipeline_parallel_size=2"], ["vllm.pipeline_parallel_size=2 with", "pipeline_model_parallel_size"]),
    ("full", [f"{E}.data_parallel_size=2"], ["vllm.data_parallel_size=2 with", f"set {R}.data_parallel_size"]),
    ("sorted", [f"{E}.max_num_seqs=64"], ["vllm.max_num_seqs=64 with", f"set {R}.max_num_seqs instead"]),
    ("sorted", [f"{E}.scheduling_policy=fcfs"], ["vllm.scheduling_policy=fcfs with", "scheduling_policy=priority"]),
    (
        "full",
        [f"actor_rollout_ref.model.path={MODELS}/qwen3_next"],
        ["qwen3_next with", "drafting.enable=true: its recurrent layers", f"set {CONFIG_PATH}.drafting.enable=false"],
    ),
    (
        "sorted",
        [f"{R}.data_parallel_size=2"],
        [f"{R}.data_parallel_size=2 with {CONFIG_PATH}.drafting.enable=true", "data_parallel_size=1", "replicas"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.sampling.coupled=true", f"{CONFIG_PATH}.drafting.enable=false"],
        [f"{CONFIG_PATH}.sampling.coupled=true with {CONFIG_PATH}.drafting.enable=false", "drop coupled"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.sampling.coupled=true", f"{CONFIG_PATH}.sorting.mode=partial"],
        ["sampling.coupled=true with", "sorting.mode=partial: only the sorted on-policy mode", "drop coupled"],
    ),
    (
        "sorted",
        ["trainer.v1.trainer_mode=sync"],
        [f"trainer_mode=sync with {CONFIG_PATH}.sorting.mode=on_policy", "sorting.mode=null", "samples in flight"],
    ),
    (
        "histospec",
        ["trainer.v1.trainer_mode=rhyme_sorted", f"{R}.agent.agent_loop_manager_class={combinations.SORTED_MANAGER}"],
        [
            f"trainer_mode=rhyme_sorted with {CONFIG_PATH}.sorting.mode=null",
            "sorting.mode=on_policy, partial or histopipe",
        ],
    ),
    (
        "sorted",
        [f"{R}.agent.agent_loop_manager_class=null"],
        ["agent_loop_manager_class=null with", "needs verl_rhyme.workers.agent_loop.SessionAgentLoopManager"],
    ),
    (
        "sorted",
        ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4"],
        [
            "trainer_mode=separate_async with",
            "parameter_sync_step=4",
            "set trainer.v1.separate_async.parameter_sync_step=1",
        ],
    ),
    (
        "sorted",
        [*APART, "trainer.v1.separate_async.hybrid_rollout.enable_switch=true"],
        ["enable_switch=true with", "hybrid_rollout.enable_switch=false"],
    ),
    (
        "stream",
        ["trainer.v1.trainer_mode=colocate_async", f"{CONFIG_PATH}.streaming.enable=false"],
        ["trainer_mode=colocate_async with", "sorting.mode=stream", "trainer_mode=separate_async"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.streaming.enable=true"],
        ["streaming.enable=true with", "sorting.mode=on_policy", "drop streaming.enable"],
    ),
    (
        "stream",
        [f"{CONFIG_PATH}.sorting.max_staleness=0", f"{CONFIG_PATH}.streaming.elastic.enable=true"],
        ["sorting.max_staleness=0 with", "streaming.elastic.enable=true", "max_staleness at least 1"],
    ),
    (
        "stream",
        [f"{R}.checkpoint_engine.backend=delta_sharded", f"{CONFIG_PATH}.streaming.elastic.enable=true"],
        ["backend=delta_sharded with", "current weights alone", "backend=relay or nccl"],
    ),
    (
        "sorted",
        [*APART, f"{CONFIG_PATH}.sorting.mode=partial", f"{CONFIG_PATH}.sorting.draft_ahead=true"],
        ["sorting.mode=partial with", "sorting.draft_ahead=true", "drop draft_ahead"],
    ),
    (
        "histospec",
        [f"{R}.checkpoint_engine.backend=shm"],
        ["checkpoint_engine.backend=shm: ", "backend=relay"],
    ),
    (
        "sorted",
        [f"{R}.checkpoint_engine.backend=relay"],
        ["trainer_mode=rhyme_sorted with", "nothing is relayed", "trainer_mode=separate_async"],
    ),
    (
        "histopipe",
        [*APART, f"{CONFIG_PATH}.sorting.keep_running=true", f"{R}.checkpoint_engine.backend=nccl"],
        ["checkpoint_engine.backend=nccl with", "one by one", "backend=relay"],
    ),
    (
        "sorted",
        [*APART, f"{CONFIG_PATH}.sorting.redraft=false", f"{CONFIG_PATH}.sorting.draft_ahead=true"],
        ["sorting.draft_ahead=true with", "sorting.redraft=false", "redraft=true"],
    ),
    (
        "sorted",
        ["algorithm.adv_estimator=grpo", f"{CONFIG_PATH}.sorting.unit=trajectory"],
        ["adv_estimator=grpo with", "sorting.unit=trajectory: ", "set", "sorting.unit=group"],
    ),
    (
        "sorted",
        [f"{R}.scheduling_policy=fcfs"],
        [f"{R}.scheduling_policy=fcfs with", "without priorities", f"set {R}.scheduling_policy=priority"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.sorting.mode=partial", f"{R}.enable_rollout_routing_replay=true"],
        ["experts", "sorting.mode=on_policy"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.sorting.mode=partial", f"{R}.calculate_log_probs=false"],
        [f"set {R}.calculate_log_probs=true"],
    ),
    (
        "sorted",
        ["trainer.v1.sampler.custom_sampler.path=mine.py"],
        ["custom_sampler.path=mine.py with", "is ignored", "custom_sampler.path=null"],
    ),
    ("sorted", ["actor_rollout_ref.actor.shuffle=true"], ["actor.shuffle=true with", "sorting.order=0"]),
    ("sorted", ["data.gen_batch_size=64"], ["data.gen_batch_size=64 with", "sorting.group_batches"]),
    ("sorted", ["skip.rollout_tq.enable=true"], ["skip.rollout_tq.enable=true with", "skip.rollout_tq.enable=false"]),
    (
        "histospec",
        [f"{CONFIG_PATH}.placement.policy=makespan"],
        [
            "placement.policy=makespan with",
            "sorting.mode=null: it goes by forecasts of lengths",
            "use +rhyme=histopipe",
        ],
    ),
    (
        "histospec",
        [f"{CONFIG_PATH}.placement.policy=sticky_group", f"{R}.router_config_path=mine.yaml"],
        ["router_config_path=mine.yaml with", "placement.policy=sticky_group: there is one router"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.placement.policy=least_loaded", f"{R}.full_determinism=true"],
        ["full_determinism=true with", "placement.policy=null"],
    ),
    (
        "off",
        ["trainer.v1.trainer_mode=rhyme_sorted"],
        ["trainer_mode=rhyme_sorted", f"needs {CONFIG_PATH}.enable=true", "drop +rhyme=sorted"],
    ),
    (
        "sorted",
        [f"{CONFIG_PATH}.enable=false", "trainer.v1.trainer_mode=sync"],
        ["agent_loop_manager_class=", f"needs {CONFIG_PATH}.enable=true", "drop +rhyme=sorted"],
    ),
    (
        "off",
        [*APART, f"{R}.checkpoint_engine.backend=relay"],
        ["checkpoint_engine.backend=relay: the relay needs a trainer of verl-rhyme", "add +rhyme=histospec"],
    ),
]


@pytest.mark.parametrize(
    ("row", "case"), zip(combinations.TABLE, CASES, strict=True), ids=lambda x: getattr(x, "keys", ("",))[0]
)
def test_each_row(row: combinations.Combination, case: tuple[str, list[str], list[str]]) -> None:
    group, changes, words = case
    [told] = refused(config(group, *changes))
    assert told.remedy == row.remedy
    for word in words:
        assert word in str(told)


@pytest.mark.parametrize(
    ("group", "changes"),
    [
        ("off", []),
        ("histospec", []),
        ("sorted", []),
        ("sorted", [f"{CONFIG_PATH}.sorting.mode=partial"]),
        ("off", [f"{R}.name=sglang", f"{R}.data_parallel_size=2", "trainer.use_v1=false"]),
        ("histospec", [f"{R}.calculate_log_probs=false", "actor_rollout_ref.actor.shuffle=true"]),
        ("sorted", [f"{R}.enable_rollout_routing_replay=true", f"{R}.calculate_log_probs=false"]),
        ("histospec", [f"{R}.data_parallel_size=2", f"{CONFIG_PATH}.drafting.enable=false"]),
        ("sorted", [f"{CONFIG_PATH}.sorting.mode=null", "trainer.v1.trainer_mode=sync"]),
        ("histospec", ["trainer.v1.trainer_mode=separate_async", "trainer.v1.separate_async.parameter_sync_step=4"]),
        ("histospec", [f"{R}.scheduling_policy=fcfs"]),
        ("histospec", ["data.gen_batch_size=64", "skip.rollout_tq.enable=true"]),
        ("histospec", [f"{R}.router_config_path=mine.yaml", f"{R}.full_determinism=true"]),
        ("sorted", APART),
        ("sorted", [*APART, f"{CONFIG_PATH}.sampling.coupled=true", f"{CONFIG_PATH}.sorting.draft_ahead=true"]),
        ("sorted", [*APART, f"{CONFIG_PATH}.sorting.mode=partial", f"{CONFIG_PATH}.placement.policy=sticky_group"]),
        ("sorted", ["trainer.v1.trainer_mode=colocate_async", "data.gen_batch_size=1"]),
        ("sorted", [f"{CONFIG_PATH}.placement.policy=makespan"]),
        ("histopipe", [f"{R}.calculate_log_probs=false"]),
        ("histopipe", APART),
        ("histopipe", [*APART, f"{CONFIG_PATH}.sorting.keep_running=true", f"{R}.checkpoint_engine.backend=relay"]),
        ("stream", [f"{R}.checkpoint_engine.backend=relay"]),
        ("stream", [f"{CONFIG_PATH}.sorting.max_staleness=0", "algorithm.adv_estimator=gae"]),
        ("histopipe", [*APART, f"{CONFIG_PATH}.streaming.enable=true"]),
        ("sorted", [*APART, f"{CONFIG_PATH}.streaming.enable=true"]),
        ("stream", [f"{CONFIG_PATH}.sorting.harvest=shortest"]),
        ("stream", [f"{CONFIG_PATH}.streaming.elastic.enable=true", f"{R}.checkpoint_engine.backend=relay"]),
        ("full", [f"{CONFIG_PATH}.streaming.elastic.enable=true"]),
        ("full", []),
        ("full", ["trainer.v1.separate_async.parameter_sync_step=1", f"{CONFIG_PATH}.sorting.load=rolling"]),
        ("histospec", ["trainer.v1.trainer_mode=separate_async", f"{R}.checkpoint_engine.backend=relay"]),
        ("histospec", ["trainer.v1.trainer_mode=my_async", f"{R}.checkpoint_engine.backend=relay"]),
        ("histopipe", [f"{CONFIG_PATH}.placement.policy=skewness_aware", "trainer.v1.trainer_mode=colocate_async"]),
        ("sorted", ["algorithm.adv_estimator=gae", f"{CONFIG_PATH}.sorting.unit=trajectory"]),
        ("sorted", ["algorithm.adv_estimator=grpo", "algorithm.filter_groups.enable=true"]),
        *(
            (group, [f"actor_rollout_ref.model.path={MODELS}/qwen3_next", f"{CONFIG_PATH}.drafting.enable=false"])
            for group in ("histospec", "sorted", "histopipe", "stream", "full")
        ),
        ("full", ["actor_rollout_ref.model.path=no/folder"]),
        ("sorted", [f"{E}.scheduling_policy=priority", f"{E}.ubatch_size=1", f"{E}.scheduler_cls=null"]),
        ("histospec", [f"{R}.mtp.enable=true", f"{R}.mtp.enable_rollout=false"]),
        ("histospec", [f"{E}.async_scheduling=true", f"{CONFIG_PATH}.drafting.enable=false"]),
        ("histospec", [f"{E}.distributed_executor_backend=uni", f"{E}.config_format=hf"]),
        ("off", [f"{E}.speculative_config={{method: ngram}}", f"{E}.data_parallel_size=2"]),
    ],
)
def test_what_goes_together(group: str, changes: list[str]) -> None:
    assert refused(config(group, *changes)) == []


@pytest.mark.parametrize(
    "name",
    ["pipeline-parallel-size", "pipeline_parallel", "pipe", "speculative-config", "speculative_config.method", "spec"],
)
def test_an_engine_option_is_found_however_its_name_is_written(name: str) -> None:
    tree = config("histospec")
    tree.actor_rollout_ref.rollout.engine_kwargs = {"vllm": {name: 2}}
    assert refused(tree)


@pytest.mark.parametrize(
    ("changes", "torn"),
    [
        (["algorithm.adv_estimator=gae"], False),
        (["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true"], True),
        (["algorithm.adv_estimator=gae", "algorithm.filter_groups.enable=true", "unit=group"], False),
        (["algorithm.adv_estimator=rloo", "unit=trajectory"], True),
        (["algorithm.adv_estimator=rloo", "unit=trajectory", "mode=null", "trainer.v1.trainer_mode=sync"], False),
    ],
)
def test_groups_that_are_compared_are_not_torn_apart(changes: list[str], torn: bool) -> None:
    ours = ("unit", "mode")
    changes = [f"{CONFIG_PATH}.sorting.{change}" if change.startswith(ours) else change for change in changes]
    assert ["tear groups apart" in str(refusal) for refusal in refused(config("sorted", *changes))] == [True] * torn


def test_every_group_is_a_system() -> None:
    groups = {path.stem for path in (ROOT / "verl_rhyme" / "conf" / "rhyme").glob("*.yaml")}
    assert groups == set(SYSTEMS)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("sorted", "not installed beside verl"),
        (
            "histospeck",
            r"no such group; use \+rhyme=histospec or \+rhyme=sorted or .*=histopipe or .*=stream or \+rhyme=full, or ",
        ),
    ],
)
def test_a_group_that_hydra_did_not_find(name: str, words: str) -> None:
    told = combinations.group_not_found(name)
    assert f"+rhyme={name} did not find its config group" in told.detail
    assert re.search(words, told.remedy)


def settings(commands: str) -> list[str]:
    script = f"set -euo pipefail; NAME=test; source {ROOT}/recipes/settings.sh; {commands}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_run_scripts_refuse_what_the_table_refuses() -> None:
    pairs = list(itertools.product([*SYSTEMS, "histospeck"], MODES))
    tries = "; ".join(f"(RHYME={name} MODE={mode}; check_rhyme) 2>&1 || true; echo ." for name, mode in pairs)
    answers = "\n".join(settings(tries)).split(".\n")
    told = dict(zip(pairs, [answer.rstrip(".\n") for answer in answers], strict=True))
    use = "use histospec, sorted, histopipe, stream, full or off"
    for (name, mode), answer in told.items():
        system = SYSTEMS.get(name)
        if system is None:
            assert answer == f"test: RHYME={name} is unknown; {use}"
        else:
            allowed = system.modes is None or mode in system.modes
            if allowed:
                assert answer == ""
            else:
                exclude = f"test: MODE={mode} and RHYME={name} exclude each other; with {name} use MODE="
                assert answer == exclude + " or ".join(system.modes or ())
            # with MODE=sync, where a system has it, the group's own trainer mode stands
            own = mode == "sync" and (system.modes is None or "sync" in system.modes)
            changes = [] if own else [f"trainer.v1.trainer_mode={mode}"]
            assert (refused(config(name, *changes)) == []) == allowed


def test_the_run_scripts_call_an_arm_as_python_does() -> None:
    runs = [
        ("off", "", ""),
        ("histospec", "", ""),
        *itertools.product(["sorted"], ("on_policy", "partial"), ("", "0", "1")),
    ]
    runs += [("histopipe", "", ""), ("full", "", ""), ("stream", "", "")]
    variables = "RHYME={} SORTED_MODE={} SORTED_COUPLED={}"
    lines = settings("; ".join(f'{variables.format(*run)}; check_rhyme; echo "$(arm_name)"' for run in runs))
    for (name, mode, coupled), told in zip(runs, lines, strict=True):
        changes = [f"{CONFIG_PATH}.sorting.mode={mode}"] if mode else []
        changes += [f"{CONFIG_PATH}.sampling.coupled={coupled == '1'}".lower()] if coupled else []
        assert told == arm_name(config_tree.from_verl(config(name, *changes)))


@pytest.mark.parametrize(
    ("group", "changes", "name", "run"),
    [
        ("off", [], "off", "off"),
        ("histospec", [], "histospec", "histospec"),
        ("histospec", ["drafting.enable=false"], "histospec-undrafted", "histospec"),
        ("sorted", [], "sorted-on_policy-coupled", "sorted-on_policy"),
        ("sorted", ["sampling.coupled=false"], "sorted-on_policy", "sorted-on_policy"),
        ("sorted", ["drafting.enable=false"], "sorted-on_policy-undrafted", "sorted-on_policy"),
        ("histopipe", [], "histopipe", "histopipe"),
        (
            "histopipe",
            ["placement.policy=makespan", "drafting.enable=false"],
            "histopipe-makespan-undrafted",
            "histopipe-makespan",
        ),
        ("sorted", ["sorting.mode=partial", "drafting.enable=false"], "sorted-partial-undrafted", "sorted-partial"),
        ("stream", [], "stream-async", "stream-async"),
        ("stream", ["sorting.max_staleness=0", "placement.policy=least_loaded"], *["stream-sync-least_loaded"] * 2),
        ("stream", ["sorting.max_staleness=3", "streaming.enable=false"], *["stream-async3-whole"] * 2),
        ("histopipe", ["streaming.enable=true"], *["histopipe-streamed"] * 2),
        ("stream", ["sorting.harvest=shortest"], *["stream-async-shortest"] * 2),
        ("stream", ["sorting.harvest=loaded"], *["stream-async"] * 2),
        (
            "sorted",
            ["sorting.harvest=shortest", "sorting.load=refill"],
            "sorted-on_policy-refill-coupled",
            "sorted-on_policy-refill",
        ),
        ("sorted", ["streaming.enable=true"], "sorted-on_policy-streamed-coupled", "sorted-on_policy-streamed"),
        ("full", ["sampling.coupled=false"], *["full"] * 2),
        (
            "full",
            ["sorting.load=rolling", "sorting.keep_running=false", "sorting.max_staleness=2", "drafting.enable=false"],
            "full-2-rolling-cut-undrafted",
            "full-2-rolling-cut",
        ),
    ],
)
def test_an_arm_says_what_is_on(group: str, changes: list[str], name: str, run: str) -> None:
    rhyme = config_tree.from_verl(config(group, *(f"{CONFIG_PATH}.{change}" for change in changes)))
    assert (arm_name(rhyme), arm_name(rhyme, switches=False)) == (name, run)


def test_the_document_shows_list_and_table() -> None:
    wanted = []
    for system in SYSTEMS.values():
        modes = "any" if system.modes is None else ", ".join(system.modes)
        wanted.append(f"| `{system.name}` | {modes} | {system.what} |")
    for row in combinations.TABLE:
        keys = ", ".join(f"`{key}`" for key in row.keys) + ("" if row.rhyme else " (without rhyme)")
        wanted.append(f"| {keys} | {row.reason} | {row.remedy} |".replace(CONFIG_PATH, "rhyme"))
    lines = (ROOT / "docs" / "combinations.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(("| `", "| [`"))] == wanted
