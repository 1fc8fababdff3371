"""Asynchronous scheduling with drafts of ours: whatever happens to requests, their text is that of a plain engine.

The noise of a draw depends on the request and the position alone. So a request's tokens and log-probabilities do not
depend on drafts, on the rows next to it, or on the order of steps. A plain, synchronous engine generates the same.
"""

import random
from dataclasses import dataclass, field

import numpy as np
import pytest

from tests.conftest import examples
from verl_rhyme.engine.proposer import HistoryProposer
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.noise import key_of

pytestmark = pytest.mark.xdist_group("asynchronous")

VOCABULARY, MODEL_LEN, LONGEST = 12, 96, 48
#: Prompts come in chunks, rows sit out steps, and requests are preempted by others of higher priority.
TIGHT = {
    "max_model_len": MODEL_LEN,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 40,
    "num_gpu_blocks_override": 18,
    "block_size": 32,
    "enable_prefix_caching": True,
    "enable_chunked_prefill": True,
    "scheduling_policy": "priority",
}


@dataclass
class Request:
    """A request, and what a plain engine says of it."""

    name: str
    prompt: list[int]
    settings: dict
    priority: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    reason: str = ""

    def params(self):
        from vllm import SamplingParams

        meta = RequestMeta(
            id=self.name, key=prompt_key(self.prompt[:4]).hex(), noise=f"{key_of('test', self.name):016x}"
        )
        settings = {"ignore_eos": True, "detokenize": False, "logprobs": 0, **self.settings}
        return SamplingParams(**meta.put(settings))

    def expect(self, output):
        answer = output.outputs[0]
        self.tokens, self.reason = list(answer.token_ids), answer.finish_reason
        self.logprobs = [at[token].logprob for token, at in zip(answer.token_ids, answer.logprobs, strict=True)]


def requests(rng, count, name):
    """Requests of four prompts' beginnings, with all kinds of ends and options."""
    made = []
    for i in range(count):
        size = rng.choice([4, 5, 20, 33, 60, 90])
        prompt = random.Random(rng.randrange(4)).choices(range(VOCABULARY), k=size)
        settings = {"temperature": rng.choice([0.0, 1.0, 1.0]), "max_tokens": rng.choice([1, 2, 7, 30, LONGEST])}
        if rng.random() < 0.4:
            settings |= {
                "stop_token_ids": rng.sample(range(VOCABULARY), 2),
                "min_tokens": min(3, settings["max_tokens"]),
            }
        if rng.random() < 0.3:
            settings |= {"repetition_penalty": 1.3, "presence_penalty": 0.4, "top_p": 0.9}
        made.append(Request(f"{name}-{i}", prompt, settings, priority=rng.randrange(3)))
    return made


@pytest.fixture(scope="module")
def engine(build_engine, write_history, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history") / "node"
    write_history(folder, [])
    made = build_engine(folder, drafting={"floor": 1e-3, "weigh_cost": False, "max_tokens": 6}, **TIGHT)
    made.history_folder = folder
    return made


@pytest.fixture(scope="module")
def expect(build_engine):
    """``expect(requests)`` has a plain engine say what they are."""
    engine = build_engine(draws=True, max_model_len=MODEL_LEN, async_scheduling=False)

    def say(requests):
        outputs = engine.generate(
            [{"prompt_token_ids": each.prompt} for each in requests],
            [each.params() for each in requests],
            use_tqdm=False,
        )
        for each, output in zip(requests, outputs, strict=True):
            each.expect(output)

    say.engine = engine
    return say


def runner_of(engine):
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner


@pytest.fixture(autouse=True)
def moods(monkeypatch):
    """The drafter changes its mind at random."""
    rng, state = random.Random(0), [True]

    def wants(self):
        state[0] ^= rng.random() < 0.15
        return state[0]

    monkeypatch.setattr(HistoryProposer, "wants_drafts", property(wants))


def half_true(rng, requests):
    for each in requests:
        text = [(token + 1) % VOCABULARY if rng.random() < 0.1 else token for token in each.tokens]
        if text:
            yield each.prompt[:4], text


def run(engine, rng, waiting, aborts=0.0, resets=0.0, pauses=0.0):
    """Run requests that come at random; return their last outputs by name, and those that were aborted."""
    core, outputs, aborted = engine.llm_engine, {}, set()
    waiting, running = list(waiting), []
    while waiting or core.has_unfinished_requests():
        while waiting and (rng.random() < 0.5 or not core.has_unfinished_requests()):
            each = waiting.pop(0)
            core.add_request(each.name, {"prompt_token_ids": each.prompt}, each.params(), priority=each.priority)
            running.append(each.name)
        for output in core.step():
            outputs[output.request_id] = output
            if output.finished:
                running.remove(output.request_id)
        if running and rng.random() < aborts:
            name = running.pop(rng.randrange(len(running)))
            core.abort_request([name])
            aborted.add(name)
        if rng.random() < pauses:  # the step in flight ends meanwhile
            core.engine_core.engine_core.pause_scheduler(mode="keep", clear_cache=False)
            for output in core.step():
                outputs[output.request_id] = output
                if output.finished:
                    running.remove(output.request_id)
            core.engine_core.engine_core.resume_scheduler()
        if rng.random() < resets:
            assert engine.reset_prefix_cache(reset_running_requests=True)
    return outputs, aborted


def check(each, output, whole=True):
    answer = output.outputs[0]
    tokens = list(answer.token_ids)
    logprobs = [at[token].logprob for token, at in zip(tokens, answer.logprobs, strict=True)]
    if whole:
        assert (tokens, answer.finish_reason) == (each.tokens, each.reason), each
    else:
        assert tokens == each.tokens[: len(tokens)], each
    assert np.allclose(logprobs, each.logprobs[: len(logprobs)], atol=2e-4), each


def test_whatever_happens_to_requests_their_text_is_the_plain_engines(engine, expect, write_history, monkeypatch):
    rng = random.Random(1)
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    preempted, preempt = [], scheduler._preempt_request
    monkeypatch.setattr(
        scheduler, "_preempt_request", lambda request, at: (preempted.append(request.request_id), preempt(request, at))
    )
    before = engine.collective_rpc("draft_totals")[0]
    for world in range(examples(6, slow=200)):
        each = requests(rng, 40, f"w{world}")
        expect(each)
        write_history(engine.history_folder, list(half_true(rng, each)))
        outputs, aborted = run(engine, rng, each, aborts=0.05, resets=0.05 * (world % 2), pauses=0.1)
        for one in each:
            if one.name not in aborted:
                check(one, outputs[one.name])
            elif one.name in outputs:
                check(one, outputs[one.name], whole=False)
        assert not scheduler.requests
        assert len(runner_of(engine).rhyme_steps._over) <= len(runner_of(engine).requests)
    after = engine.collective_rpc("draft_totals")[0]
    assert after["errors"] == 0
    assert after["accepted"] - before["accepted"] > 200
    assert after["drafted"] - after["accepted"] > 200
    assert len(preempted) > 10, "the test must see preemptions"


def test_a_response_goes_on_under_new_weights(engine, expect, write_history):
    """Its engine is paused with a step in flight, gets other weights, and is given the text so far as a prompt."""
    rng = random.Random(2)
    core = engine.llm_engine.engine_core.engine_core
    heads = [runner_of(made).model.lm_head.weight for made in (engine, expect.engine)]
    kept = [head.detach().clone() for head in heads]
    for world in range(examples(3, slow=60)):
        each = [one for one in requests(rng, 16, f"v{world}") if len(one.prompt) < 40]
        expect(each)
        write_history(engine.history_folder, list(half_true(rng, each)))
        for one in each:
            engine.llm_engine.add_request(one.name, {"prompt_token_ids": one.prompt}, one.params())
        outputs = {}
        for _ in range(rng.randrange(4, 20)):
            outputs |= {output.request_id: output for output in engine.llm_engine.step()}
        core.pause_scheduler(mode="abort")
        engine.llm_engine.abort_request([one.name for one in each])
        for head in heads:
            head.data.mul_(-1)
        core.resume_scheduler()
        later = []
        for one in each:
            said = list(outputs[one.name].outputs[0].token_ids) if one.name in outputs else []
            assert said == one.tokens[: len(said)]
            if len(said) < len(one.tokens) and len(one.prompt) + len(said) < MODEL_LEN:
                settings = one.settings | {"max_tokens": one.settings["max_tokens"] - len(said), "min_tokens": 0}
                later.append(Request(f"{one.name}-on", one.prompt + said, settings))
        expect(later)
        outputs, _ = run(engine, rng, later)
        for one in later:
            check(one, outputs[one.name])
        for head, old in zip(heads, kept, strict=True):
            head.data.copy_(old)


def test_the_last_response_ends_at_the_models_longest_text(engine, expect, write_history, monkeypatch):
    """Its last step has been scheduled when it is known to end."""
    monkeypatch.setattr(HistoryProposer, "wants_drafts", True)
    for size in range(MODEL_LEN - 16, MODEL_LEN - 1):
        [one] = each = [
            Request(f"end-{size}", random.Random(9).choices(range(VOCABULARY), k=size), {"temperature": 1.0})
        ]
        one.settings["max_tokens"] = LONGEST
        expect(each)
        assert len(one.tokens) == MODEL_LEN - size
        write_history(engine.history_folder, [(one.prompt[:4], one.tokens)])
        outputs, _ = run(engine, random.Random(0), each)
        check(one, outputs[one.name])


def test_steps_are_timed_where_their_tokens_are_noticed_alike(engine, write_history, monkeypatch):
    """On a CPU the host never waits for tokens. It notices those of a step that the next one does not wait for a step
    later, so that the step before a wait seems to take no time."""
    proposer, seen = runner_of(engine).drafter, []
    take_in = proposer.take_in
    monkeypatch.setattr(
        proposer, "take_in", lambda step: (seen.append((step.next_launched, step.timed)), take_in(step))[1]
    )
    write_history(engine.history_folder, [])
    rng = random.Random(3)
    run(
        engine, rng, [Request(f"t-{i}", rng.choices(range(VOCABULARY), k=8), {"max_tokens": LONGEST}) for i in range(6)]
    )
    launched, timed = map(np.array, zip(*seen, strict=True))
    alike = launched[1:] == launched[:-1]
    assert 0 < alike.sum() < len(alike)
    # All and none, unless another process took the core meanwhile.
    assert timed[1:][alike].mean() > 0.9
    assert timed[1:][~alike].mean() < 0.3


def test_steps_without_drafts_reserve_nothing(engine, expect, write_history, monkeypatch):
    """Neither slots of the cache nor tokens of a step; with drafts a request holds a block or two more."""
    scheduler = engine.llm_engine.engine_core.engine_core.scheduler
    held = []
    for wants in (False, True):
        monkeypatch.setattr(HistoryProposer, "wants_drafts", wants)
        each = [Request(f"r{wants}-{i}", [1, 2, 3, i], {"max_tokens": 26, "temperature": 1.0}) for i in range(6)]
        expect(each)
        write_history(engine.history_folder, list(half_true(random.Random(0), each)))
        for one in each:
            engine.llm_engine.add_request(one.name, {"prompt_token_ids": one.prompt}, one.params())
        blocks = scheduled = 0
        schedule = scheduler.schedule

        def watched(*arguments, schedule=schedule):
            nonlocal scheduled
            plan = schedule(*arguments)
            if plan.scheduled_cached_reqs.req_ids and not plan.scheduled_new_reqs:
                scheduled = max(scheduled, *plan.num_scheduled_tokens.values())
            return plan

        monkeypatch.setattr(scheduler, "schedule", watched)
        while engine.llm_engine.has_unfinished_requests():
            engine.llm_engine.step()
            pool = scheduler.kv_cache_manager.block_pool
            blocks = max(blocks, pool.num_gpu_blocks - 1 - pool.get_num_free_blocks())
        monkeypatch.setattr(scheduler, "schedule", schedule)
        assert scheduled == 1, "prompts have the rest of a step's tokens"
        held.append(blocks)
    assert held[0] == 6  # texts of 30 tokens in blocks of 32
    assert 6 < held[1] <= 12
