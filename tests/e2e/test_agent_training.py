"""An agent that searches (examples/agent), trained as a user runs it: verl's own tool_agent loop, several turns."""

import asyncio
import json
from collections import Counter
from itertools import groupby

import numpy as np
import pytest
import torch
import whole_run
from transformers import AutoModelForCausalLM, AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.function_tool import load_function_tools_from_path
from whole_run import ROOT

from tests.conftest import ONLY_SLOW
from verl_rhyme.scheduling.attempts import Attempt

pytestmark = [pytest.mark.timeout(1200), pytest.mark.whole_run]
PROMPTS, SAMPLES, BATCH = 12, 4, 4
STEPS = PROMPTS // BATCH
LIMIT, TURNS = 288, 8  # tokens and policy's turns of a response (tiny_cpu_world/agent.yaml)
MODEL = ROOT / "examples" / "agent" / "model"
SMALL = (
    f"data.train_batch_size={BATCH}",
    f"actor_rollout_ref.rollout.n={SAMPLES}",
    f"actor_rollout_ref.actor.ppo_mini_batch_size={BATCH}",
    f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={BATCH * SAMPLES}",
    f"actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu={BATCH * SAMPLES}",
    "actor_rollout_ref.rollout.max_num_seqs=8",
    "trainer.save_freq=1",  # the weights of each version
    "trainer.max_actor_ckpt_to_keep=null",
    f"actor_rollout_ref.rollout.multi_turn.function_tool_path={ROOT / 'tests' / 'e2e' / 'counted_search.py'}",
)
RUNS = {
    "full-k1": {"RHYME": "full", "STALENESS": "1"},
    "full-k1-separate": {"RHYME": "full", "STALENESS": "1", "MODE": "separate_async"},
    "full-k0": {"RHYME": "full", "STALENESS": "0"},
    "histospec": {"RHYME": "histospec"},
}


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.xdist_group(f"agent-{name}"), *([] if i < 1 else [ONLY_SLOW])])
        for i, name in enumerate(RUNS)
    ],
)
def run(request, tmp_path_factory):
    """Name, folder and trained trajectories of a run."""
    folder = tmp_path_factory.mktemp(request.param)
    settings = {"MODEL": "agent", "PROMPTS": str(PROMPTS), **RUNS[request.param]}
    settings |= whole_run.steady("60", "watched_agent")  # updates come while samples run and tools search
    whole_run.finish(whole_run.start(folder, *SMALL, epochs=1, **settings), folder)
    return request.param, folder, lines(folder / "trained.jsonl")


def lines(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def sample_of(name):
    """(uid, number) and attempt of a sample, by the name of its attempt or the key of its trajectory."""
    attempt = Attempt.named(name)
    return attempt.sample, attempt.attempt


def attempt_of(row):
    return row["key"].rpartition("_")[0]


def turns_of(row):
    """(policy's, tokens) of each turn and each answer of a tool."""
    pairs = zip(row["response_mask"], row["responses"], strict=True)
    return [(bool(mask), [token for _, token in part]) for mask, part in groupby(pairs, key=lambda pair: pair[0])]


def spans_of(row):
    """(begin, end, policy version) in the response of what each request generated."""
    for each in row["requests"]:
        begin = each["prompt_tokens"] - len(row["prompts"])
        assert each["policy_version_start"] == each["policy_version_end"]
        yield begin, begin + each["response_tokens"], each["policy_version_end"]


def test_each_sample_is_trained_once_in_several_turns(run):
    _, folder, trained = run
    assert len(trained) == len({sample_of(attempt_of(row))[0] for row in trained}) == PROMPTS * SAMPLES
    assert Counter(row["step"] for row in trained) == dict.fromkeys(range(1, STEPS + 1), BATCH * SAMPLES)
    turns = [len(row["requests"]) for row in trained]
    assert max(turns) >= 3
    assert np.mean(turns) > 2
    steps = [metrics for _, metrics in whole_run.steps_of(folder)]
    assert all(metrics["num_turns/max"] > 2 for metrics in steps)


def test_the_mask_has_what_requests_generated(run):
    """Answers of the tool, and what the chat template adds, are 0, with log-probability 0."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    for row in run[2]:
        mask, limit = np.array(row["response_mask"]), len(row["responses"])
        generated = np.zeros_like(mask)
        for begin, end, _ in spans_of(row):
            assert not generated[begin : min(end, limit)].any(), "a token was generated twice"
            generated[begin:end] = 1
        np.testing.assert_array_equal(mask, generated)
        assert not np.array(row["rollout_log_probs"])[mask == 0].any()
        for policy, tokens in turns_of(row):
            text = tokenizer.decode(tokens)
            assert policy or "<tool_response>" in text, text  # the policy may write anything


def weights_of(folder, version):
    """The model that made a version's tokens."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    if version:
        file = folder / "checkpoints" / f"global_step_{version}" / "actor" / "model_world_size_1_rank_0.pt"
        state = torch.load(file, weights_only=False)
        model.load_state_dict({name: getattr(tensor, "_local_tensor", tensor) for name, tensor in state.items()})
    return model


@torch.no_grad()
def test_log_probs_are_those_of_the_version_that_made_a_token(run):
    name, folder, trained = run
    models, worst, versions = {}, 0.0, set()
    for row in trained:
        sequence = torch.tensor(row["prompts"] + row["responses"])
        for begin, end, version in spans_of(row):
            assert 0 <= row["step"] - 1 - version <= ("full-k1" in name)
            versions.add((row["step"], version))
            if version not in models:
                models[version] = weights_of(folder, version)
            end = min(end, len(row["responses"]))
            if begin >= end:  # a turn beyond the response's limit
                continue
            at = len(row["prompts"]) + torch.arange(begin, end)
            logits = models[version](sequence[None, : at[-1] + 1]).logits[0, at - 1].log_softmax(-1)
            exact = logits[torch.arange(len(at)), sequence[at]]
            given = torch.tensor(row["rollout_log_probs"][begin:end])
            worst = max(worst, (exact - given).abs().max().item())
    assert worst < 1e-4
    if "full-k1" in name:
        assert any(version < step - 1 for step, version in versions), "no sample ran over an update"


def test_turns_draw_independently(run):
    """Each turn has noise of its own; a turn that is sent again, also in another attempt, has the same."""
    name, folder, _ = run
    if name == "histospec":
        assert not (folder / "noise.jsonl").exists(), "requests draw with noise of their own"
        return
    noise = {}
    for row in lines(folder / "noise.jsonl"):
        noise.setdefault((sample_of(row["attempt"])[0], row["prompt"]), set()).add(row["noise"])
    assert all(len(values) == 1 for values in noise.values())
    assert len({*map(min, noise.values())}) == len(noise) > PROMPTS * SAMPLES


def searches_of(row, parser, schema):
    """Calls of the tool that verl's loop made; the answer of the last is lost if the response has no room for it."""
    turns, length = [], 0
    for policy, tokens in turns_of(row):
        length += len(tokens)
        if policy and length < LIMIT:
            turns.append(tokens)
    count = 0
    for tokens in turns[: TURNS - 1]:
        _, calls = asyncio.run(parser.extract_tool_calls(tokens, [schema]))
        # Of several calls verl makes the first. Without its argument, or of another tool, an error is the answer.
        count += bool(calls) and (calls[0].name, [*json.loads(calls[0].arguments)]) == ("search", ["query"])
    return count


def test_tools_are_called_once_a_turn(run):
    """At k = 0 what an update interrupts is regenerated, with its calls."""
    name, folder, trained = run
    calls = lines(folder / "calls.jsonl")
    parser = ToolParser.get_tool_parser("qwen3_coder", AutoTokenizer.from_pretrained(MODEL))
    [tool] = load_function_tools_from_path(str(ROOT / "examples" / "agent" / "search.py"))
    wanted = [searches_of(row, parser, tool.tool_schema) for row in trained]
    if name == "histospec":  # its attempts have no names
        assert len(calls) == sum(wanted)
        return
    by_attempt = Counter(row["attempt"] for row in calls)
    by_sample = Counter(sample_of(row["attempt"])[0] for row in calls)
    for row, count in zip(trained, wanted, strict=True):
        attempt = attempt_of(row)
        if "full-k1" in name:
            assert by_sample[sample_of(attempt)[0]] == count
        else:
            assert by_attempt[attempt] == count
