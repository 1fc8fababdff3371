"""The proposer under arbitrary batches: no errors, and no draft beyond a bound. tests/e2e uses the real engine."""

import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.conftest import examples
from verl_rhyme.drafting.bounds import logits_budget
from verl_rhyme.drafting.policy import RequestCounts
from verl_rhyme.engine.proposer import HistoryProposer
from verl_rhyme.history.copies import Copies
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.record import PromptHistory, Trajectory
from verl_rhyme.history.store import HistoryStore
from verl_rhyme.planning.experts import Experts
from verl_rhyme.processes.request import RequestMeta

SamplingParams = pytest.importorskip("vllm").SamplingParams
PretrainedConfig = pytest.importorskip("transformers").PretrainedConfig

VOCABULARY, ROWS, LENGTH, STEP_TOKENS = 40, 16, 256, 96
NAMESPACE = "test"


def proposer_for(folder, fields=None, **drafting):
    config = SimpleNamespace(
        additional_config={
            "rhyme": {
                "drafting": drafting,
                "history_dir": str(folder),
                "copies_dir": f"{folder}.copies",
                "namespace": NAMESPACE,
            }
        },
        model_config=SimpleNamespace(
            max_model_len=LENGTH,
            get_vocab_size=lambda: VOCABULARY,
            dtype=torch.bfloat16,
            hf_text_config=PretrainedConfig(**fields or {}),
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=STEP_TOKENS,
            max_num_scheduled_tokens=STEP_TOKENS,
            max_num_seqs=ROWS,
            async_scheduling=False,
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    proposer = HistoryProposer(config)
    batch = SimpleNamespace(req_ids=[], spec_token_ids=[], num_prompt_tokens=np.zeros(ROWS, np.int32))
    ends = SimpleNamespace(np=np.zeros(ROWS + 1, np.int32))
    proposer._runner = SimpleNamespace(input_batch=batch, requests={}, query_start_loc=ends)
    proposer._start()
    return proposer


def admit(proposer, names, prompt, **meta):
    """Start requests in the first rows."""
    runner = proposer._runner
    for name in names:
        params = SamplingParams(max_tokens=100, **RequestMeta(id=name, **meta).put({}))
        runner.requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt)
    runner.input_batch.req_ids = list(names)
    runner.input_batch.spec_token_ids = [[] for _ in names]
    runner.input_batch.num_prompt_tokens[:] = len(prompt)


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
@pytest.mark.timeout(1800)
def test_any_schedule_gives_no_errors_and_bounded_drafts(tmp_path, policy):
    calls = examples(4_000, slow=1_000_000)
    rng = np.random.default_rng(0)
    prompts = [rng.integers(0, VOCABULARY, rng.integers(2, 30)).tolist() for _ in range(8)]
    with HistoryStore(tmp_path / "h", NAMESPACE, max_bytes=1 << 22, epochs=2) as store:
        for prompt in prompts:  # some ids are beyond the vocabulary
            response = rng.integers(0, VOCABULARY + 20, 200).astype(np.int32)
            store.append([Trajectory(prompt_key(prompt), response, 1.0, 0, 0, 0)], 0)
    options = {"floor": 0.02, "plan_threads": 2} if policy == "adaptive" else {}
    proposer = proposer_for(tmp_path / "h", policy=policy, **options)
    if policy == "paper":
        proposer._drafter._match = 1, 4
    runner, tokens = proposer._runner, np.zeros((ROWS, LENGTH), np.int32)
    lengths = np.zeros(ROWS, np.int32)
    state: dict[str, dict] = {}  # what vLLM knows of a request
    waiting: list[str] = []  # preempted
    rows: list[str] = []
    made = drafted = 0
    for _ in range(calls):
        while len(rows) < ROWS and rng.random() < 0.4:
            if waiting and rng.random() < 0.5:
                name = waiting.pop()
            else:
                name, made = f"r{made}", made + 1
                prompt = prompts[rng.integers(len(prompts))]
                previous = rng.integers(0, VOCABULARY + 5, rng.integers(0, 200) if rng.random() < 0.5 else 0)
                previous = previous.astype("<i4").tobytes()
                meta = RequestMeta(id=name, key=prompt_key(prompt).hex(), earlier_text=previous)
                extra = meta.put({}) if rng.random() < 0.9 else {"extra_args": None}
                params = SamplingParams(max_tokens=int(rng.integers(1, 120)), **extra)
                state[name] = {"text": list(prompt), "prompt": len(prompt), "draft": []}
                runner.requests[name] = SimpleNamespace(sampling_params=params, prompt_token_ids=prompt)
            state[name]["draft"] = []
            rows.append(name)
        if rng.random() < 0.5:
            rng.shuffle(rows)  # vLLM condenses and swaps rows
        sampled = []
        runner.input_batch.req_ids = list(rows)
        runner.input_batch.spec_token_ids = [list(state[name]["draft"]) for name in rows]
        for row, name in enumerate(rows):
            request = state[name]
            if rng.random() < 0.05:  # still prefilling
                runner.input_batch.spec_token_ids[row] = request["draft"] = []
                new = []
            else:
                room = runner.requests[name].sampling_params.max_tokens - (len(request["text"]) - request["prompt"])
                accepted = rng.integers(0, len(request["draft"]) + 1)
                new = rng.integers(0, VOCABULARY, 1 + accepted).tolist()[: max(1, room)]
            request["text"] += new
            tokens[row, : len(request["text"])] = request["text"]
            lengths[row], runner.input_batch.num_prompt_tokens[row] = len(request["text"]), request["prompt"]
            sampled.append(new)
        drafts = proposer.propose(sampled, lengths, tokens)
        assert len(drafts) == len(rows)
        room = max(STEP_TOKENS - len(rows), 0)
        if len(rows) < ROWS or not all(sampled):  # half of the tokens are left for prompts
            room //= 2
        assert sum(map(len, drafts)) <= room
        for name, new, draft in zip(list(rows), sampled, drafts, strict=True):
            request = state[name]
            left = runner.requests[name].sampling_params.max_tokens - (len(request["text"]) - request["prompt"])
            assert new or not draft
            assert len(draft) <= max(0, min(left - 1, LENGTH - len(request["text"]) - 1, 32))
            assert all(0 <= token < VOCABULARY for token in draft)
            request["draft"] = draft
            drafted += len(draft)
            if left <= 0 or len(request["text"]) >= LENGTH - 40 or rng.random() < 0.01:  # done, or aborted
                rows.remove(name)
                del runner.requests[name], state[name]
                if rng.random() < 0.5:
                    proposer.take_counts([name])
            elif rng.random() < 0.01:  # preempted: vLLM keeps the request, and resumes it with its text
                rows.remove(name)
                waiting.append(name)
        waiting = [name for name in waiting if name in state]
    assert drafted > calls / 10
    totals = proposer.totals()
    assert totals["errors"] == totals["history_errors"] == 0


def test_error_costs_the_draft_and_is_reported_with_the_counts(tmp_path, caplog):
    proposer = proposer_for(tmp_path / "h")
    tokens = np.ones((ROWS, LENGTH), np.int32)
    admit(proposer, ["a", "b"], [1, 1, 1])
    lengths = np.full(ROWS, 4, np.int32)
    assert len(proposer.propose([[1], [1]], lengths, tokens)) == 2
    assert proposer.propose([[1], [1]], lengths, None) == [[], []]
    assert proposer.propose([[1], [1]], lengths, None) == [[], []]
    assert sum("drafting failed" in record.message for record in caplog.records) == 1
    counts = proposer.take_counts(["a", "b"])
    assert sum(count.get("draft_errors", 0) for count in counts.values()) == 2
    assert sum(count.get("draft_seconds", 0) for count in counts.values()) > 0
    assert proposer.take_counts(["a"]) == {}


@pytest.mark.parametrize("policy", ["adaptive", "paper"])
def test_regenerated_request_drafts_its_previous_text(tmp_path, policy):
    proposer = proposer_for(tmp_path / "h", policy=policy, **({"weigh_cost": False} if policy == "adaptive" else {}))
    runner, tokens = proposer._runner, np.zeros((ROWS, LENGTH), np.int32)
    prompt, response = [1, 2, 3], np.random.default_rng(0).integers(4, VOCABULARY, 100).tolist()
    admit(proposer, ["a"], prompt, earlier_text=np.array(response, "<i4").tobytes())
    done, draft, steps, new = 0, [], 0, response[:1]
    while new:
        tokens[0, len(prompt) + done : len(prompt) + done + len(new)] = new
        done, steps = done + len(new), steps + 1
        runner.input_batch.spec_token_ids = [draft]
        lengths = np.full(ROWS, len(prompt) + done, np.int32)
        (draft,) = proposer.propose([new], lengths, tokens)
        assert draft == (response[done : done + len(draft)] if policy == "adaptive" else [])
        new = response[done : done + len(draft) + 1]
    counts = proposer.take_counts(["a"])["a"]
    assert proposer.totals()["errors"] == 0
    if policy == "adaptive":
        assert steps < 10
        assert counts["reverified_tokens"] == counts["accepted_tokens"] == 100 - steps
    else:
        assert counts["reverified_tokens"] == 0


def test_memory_bounds_the_drafts_of_a_full_batch(tmp_path):
    """All drafts are certain, and the vocabulary has a realistic size."""
    memory, vocabulary = 64 << 20, 151_936
    proposer = proposer_for(tmp_path / "h", logits_memory=memory, weigh_cost=False)
    proposer._vocab_size, proposer._step_tokens = vocabulary, 8192
    tokens = np.zeros((ROWS, LENGTH), np.int32)
    prompt, response = [1, 2, 3], np.random.default_rng(0).integers(4, VOCABULARY, 100).tolist()
    admit(proposer, [f"r{i}" for i in range(ROWS)], prompt, earlier_text=np.array(response, "<i4").tobytes())
    tokens[:, : len(prompt)], tokens[:, len(prompt)] = prompt, response[0]
    drafts = proposer.propose([[response[0]]] * ROWS, np.full(ROWS, len(prompt) + 1, np.int32), tokens)
    budget = logits_budget(vocabulary, ROWS, ROWS, memory)
    assert sum(map(len, drafts)) == budget > 10 * ROWS
    assert proposer.totals()["errors"] == 0


@pytest.mark.parametrize(
    ("meta", "prompt"),
    [(RequestMeta(id="a"), [1, 2, 3]), (RequestMeta(id="d", key="no hex"), [1, 2, 3]), (RequestMeta(id="d"), None)],
    ids=["id of another request", "invalid key", "no token ids"],
)
def test_malformed_request_does_not_affect_other_drafts(tmp_path, meta, prompt):
    proposer = proposer_for(tmp_path / "h", weigh_cost=False)
    admit(proposer, ["a", "b", "c"], [1, 2, 3])
    runner = proposer._runner
    runner.requests["a2"] = SimpleNamespace(
        sampling_params=SamplingParams(max_tokens=100, **meta.put({})), prompt_token_ids=prompt
    )
    rows = ["a", "a2", "b", "c"]
    tokens, lengths = np.tile(np.arange(LENGTH, dtype=np.int32) % 3 + 1, (ROWS, 1)), np.full(ROWS, 3, np.int32)
    for step in range(40):
        if step == 20:
            del runner.requests[rows.pop(0)]
        runner.input_batch.req_ids, runner.input_batch.spec_token_ids = rows, [[] for _ in rows]
        lengths += 1
        drafts = proposer.propose([[int(tokens[0, lengths[0] - 1])]] * len(rows), lengths, tokens)
    assert all(drafts)
    assert proposer.totals()["errors"] == 0


def test_time_of_a_step_excludes_its_plan_and_admissions(tmp_path, monkeypatch):
    """Steps that prefill count as well, with their prompt tokens; those after an idle engine do not."""
    proposer = proposer_for(tmp_path / "h")
    clock, seen = [100.0], []
    monkeypatch.setattr("verl_rhyme.engine.proposer.time", SimpleNamespace(perf_counter=lambda: clock[0]))

    class Planner:
        def start(self, *_):
            clock[0] += 50.0

        def finish(self, *_):
            return RequestCounts()

        def step(self, done):
            seen.append((done.seconds, done.planning, done.prefilled, done.budget > 0))
            clock[0] += 2.0
            return [[] for _ in done.requests]

    proposer._drafter = Planner()
    admit(proposer, ["a", "b"], [1, 2, 3])

    def step(sampled, tokens):
        proposer._runner.query_start_loc.np[len(sampled)] = tokens
        proposer.propose(sampled, np.full(ROWS, 4, np.int32), np.ones((ROWS, LENGTH), np.int32))
        clock[0] += 0.25  # time of the engine

    step([[5], [5]], 6)
    step([[5], [5]], 2)
    step([[5], []], 41)
    admit(proposer, ["a", "b", "c"], [1, 2, 3])
    step([[5], [5], [5]], 5)
    proposer._runner.requests.clear()
    clock[0] += 1000.0  # idle
    admit(proposer, ["d"], [1, 2, 3])
    step([[5]], 3)
    step([[5]], 1)
    assert proposer.totals()["errors"] == 0
    assert seen == [
        (None, 0.0, 4, False),  # a step without a price drafts nothing
        (0.25, 2.0, 0, True),
        (0.25, 2.0, 40, True),
        (0.25, 2.0, 2, True),
        (None, 2.0, 2, True),
        (0.25, 2.0, 0, True),
    ]


def test_the_price_of_a_step_knows_the_policys_experts(tmp_path):
    proposer = proposer_for(tmp_path, {"num_experts": 128, "num_experts_per_tok": 8})
    assert proposer._drafter.weighing.cost.experts == Experts(128, 8)
    assert proposer_for(tmp_path)._drafter.weighing.cost.experts == Experts()


def test_only_a_request_with_a_thinking_budget_drafts_nothing(tmp_path):
    """One such request once cost its batch a third of its speed, with 94,834 drafts and none accepted."""
    proposer = proposer_for(tmp_path / "h", weigh_cost=False)
    admit(proposer, ["a", "b"], [1, 2, 3])
    proposer._runner.requests["a"].sampling_params.thinking_token_budget = 50
    drafted = []
    tokens, lengths = np.tile(np.arange(LENGTH, dtype=np.int32) % 3 + 1, (ROWS, 1)), np.full(ROWS, 3, np.int32)
    for _ in range(20):
        lengths += 1
        drafts = proposer.propose([[int(tokens[0, lengths[0] - 1])]] * 2, lengths, tokens)
        drafted.append([len(draft) for draft in drafts])
    assert all(budgeted == 0 < other for budgeted, other in drafted[10:])
    assert proposer.totals()["errors"] == 0


@pytest.mark.parametrize("wait", [False, True])
@pytest.mark.parametrize("copied", [False, True])
def test_drafts_use_a_history_as_soon_as_it_is_read(tmp_path, wait, copied):
    prompt, response = [1, 2, 3], np.random.default_rng(0).permutation(VOCABULARY - 4)[:30] + 4
    text = np.concatenate([prompt, response]).astype(np.int32)  # so that a first token has a context
    recorded = [Trajectory(prompt_key(prompt), text, 1.0, 0, 0, 0)]
    if copied:  # from another node
        Copies(tmp_path / "h.copies", 1 << 22).put(recorded[0].key, PromptHistory.build(recorded).encode(), 5)
    else:
        with HistoryStore(tmp_path / "h", NAMESPACE, max_bytes=1 << 22, epochs=2) as store:
            store.append(recorded, 0)
    proposer = proposer_for(tmp_path / "h", wait_for_history=wait, weigh_cost=False)
    names = ["gone", "a", "b"]
    admit(proposer, names, prompt, history_requested_ns=5 if copied else 0)
    tokens, lengths = np.zeros((ROWS, LENGTH), np.int32), np.full(ROWS, 3, np.int32)
    tokens[:, :3] = prompt

    def step(token):
        tokens[np.arange(ROWS), lengths] = token
        lengths[:] += 1
        rows = len(proposer._runner.input_batch.req_ids)
        return proposer.propose([[token]] * rows, lengths, tokens)

    first = step(response[0])
    assert any(first) == wait
    del proposer._runner.requests["gone"]
    proposer._runner.input_batch.req_ids = ["b", "a"]
    proposer._runner.input_batch.spec_token_ids = [[], []]
    for token in response[1:20].tolist():
        drafts = step(token)
        if all(drafts):
            break
        time.sleep(0.1)
    at = response.tolist().index(token) + 1
    assert drafts[0][0] == drafts[1][0] == response[at]
    assert proposer._history.pending == 0
    assert proposer.take_counts(["a", "b"])["b"]["history_hit"]
    assert proposer.totals()["history_errors"] == proposer.totals()["errors"] == 0
