"""Promise 1 at a real vocabulary: 151,936 entries, a Zipf tail of which is drawn, in the real engine.

What can only go wrong in a table of that size: chunks and their ends, ids beyond 2**16, thousands of near-ties, the
tail beyond top-k. Cells are the words, and the tail by ranges of ids; all added entries embed alike, so that
the distribution of a second token needs one pass of the model for each word.
"""

from itertools import islice

import numpy as np
import pytest

pytestmark = pytest.mark.xdist_group("real_vocabulary")

WORDS, VOCABULARY = 96, 151_936
SAMPLES = 512
#: First ids of the ranges of the tail: few likely entries, then ever more of them, up to the table's last quarter.
RANGES = np.array([WORDS, 100, 200, 1000, 10_000, 1 << 16, 114_000])
CELLS = WORDS + len(RANGES)
SETTINGS = {
    "T=1": {"temperature": 1.0},
    "T=0.6": {"temperature": 0.6},
    "top-k": {"temperature": 1.0, "top_k": 200},
}


def cell_of(tokens):
    return np.where(tokens < WORDS, tokens, WORDS - 1 + np.searchsorted(RANGES, tokens, side="right"))


@pytest.fixture(scope="module")
def world():
    from examples.tiny_world.widen import cached

    return cached("zipf")


@pytest.fixture(scope="module")
def model(world):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(world, dtype=torch.float32)


@pytest.fixture(scope="module")
def prompts(world):
    """Questions of the tiny world, as token ids."""
    from transformers import AutoTokenizer

    from examples.tiny_world.puzzles import generate
    from examples.tiny_world.sampling import encode_prompt

    tokenizer = AutoTokenizer.from_pretrained(world)
    return [encode_prompt(tokenizer, puzzle.text()) for puzzle in islice(generate(3, "test"), 8)]


@pytest.fixture(scope="module")
def prompt(model, prompts):
    """A question and the word that all responses begin with; a name follows, or an entry from all over the tail."""
    import torch

    with torch.no_grad():
        return [*prompts[5], int(model(torch.tensor(prompts[5:6])).logits[0, -1].argmax())]


@pytest.fixture(scope="module")
def distribution(model, prompt):
    """``distribution(temperature, top_k)``: float64 [CELLS, CELLS], of the first two tokens."""
    import torch

    follow = torch.tensor([[*prompt, token] for token in [*range(WORDS), WORDS]])  # the last for all added entries
    with torch.no_grad():
        first = model(torch.tensor([prompt])).logits[:, -1].double()
        hidden = model.model(follow).last_hidden_state[:, -1]
        second = model.lm_head(hidden).double()

    def of(temperature=1.0, top_k=0):
        def cells(logits):
            logits = logits / temperature
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            chances = logits.softmax(-1)
            index = torch.from_numpy(cell_of(np.arange(VOCABULARY))).expand(len(chances), -1)
            return torch.zeros(len(chances), CELLS, dtype=torch.float64).scatter_add_(1, index, chances).numpy()

        one, two = cells(first)[0], cells(second)
        return one[:, None] * np.concatenate([two[:WORDS], two[WORDS:].repeat(len(RANGES), axis=0)])

    return of


def history_of(kind, prompt, distribution):
    """Responses of four tokens that the drafter is given."""
    rng = np.random.default_rng(0)
    joint = distribution()
    if kind == "true":  # drafted where a sample begins so; words, or the first entry of a range
        starts = np.append(np.arange(WORDS), RANGES)
        cells = rng.choice(joint.size, p=joint.ravel() / joint.sum(), size=24)
        pairs = [(starts[cell // CELLS], starts[cell % CELLS]) for cell in cells]
    else:  # after each word, what is never said: most of it far out in the table
        pairs = [(word, rng.choice([VOCABULARY - 1, 1 << 16, 100_000, 3])) for word in range(WORDS)]
    return [(prompt, [int(a), int(b), 7, 8]) for a, b in pairs]


@pytest.fixture(scope="module")
def engine(world, build_engine, write_history, tmp_path_factory):
    folder = tmp_path_factory.mktemp("history")
    write_history(folder, [])
    built = build_engine(
        folder,
        model=world,
        # Drafts come from the history alone, so that a test decides what they are.
        drafting={"policy": "paper", "max_tokens": 4},
        max_model_len=256,
        max_num_seqs=32,
        num_gpu_blocks_override=512,
        enable_prefix_caching=True,
    )
    built.history_folder = folder
    return built


def drafts_of(engine):
    totals = engine.collective_rpc("draft_totals")[0]
    assert totals["errors"] == totals["history_errors"] == 0
    return np.array([totals["drafted"], totals["accepted"]])


def sample(engine, prompt, **params):
    """int [samples, 2]."""
    from vllm import SamplingParams

    settings = SamplingParams(max_tokens=3, ignore_eos=True, detokenize=False, **params)
    outputs = engine.generate([{"prompt_token_ids": prompt}] * SAMPLES, settings, use_tqdm=False)
    return np.array([output.outputs[0].token_ids[:2] for output in outputs])


@pytest.mark.parametrize(
    ("kind", "setting"),
    [*(("true", setting) for setting in SETTINGS), ("adversarial", "top-k")],
)
def test_output_distribution_is_the_targets(engine, prompt, distribution, write_history, p_value, kind, setting):
    write_history(engine.history_folder, history_of(kind, prompt, distribution))
    before = drafts_of(engine)
    tokens = sample(engine, prompt, **SETTINGS[setting])
    drafted, accepted = drafts_of(engine) - before
    if kind == "true":
        assert 0 < accepted < drafted, "the test must see acceptances and rejections"
    else:
        assert drafted - accepted > SAMPLES / 2
    cells = cell_of(tokens)
    if setting == "T=1":
        assert (tokens >= 1 << 16).any(), "the test must see far entries drawn"
    assert p_value(cells, distribution(**SETTINGS[setting])) > 1e-4


def test_greedy_output_is_the_undrafted_one(engine, world, prompts, build_engine, write_history):
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, detokenize=False)
    requests = [{"prompt_token_ids": prompt} for prompt in prompts]
    write_history(engine.history_folder, [])
    plain = build_engine(model=world, max_model_len=256)
    stock = [o.outputs[0].token_ids for o in plain.generate(requests, greedy, use_tqdm=False)]
    # Half true, half broken off and continued wrongly, with ids from all over the table.
    responses = [
        list(text) if i % 2 else [*text[:8], VOCABULARY - 1, *text[9:16], 1 << 16] for i, text in enumerate(stock)
    ]
    write_history(engine.history_folder, list(zip(prompts, responses, strict=True)))
    before = drafts_of(engine)
    drafted = [o.outputs[0].token_ids for o in engine.generate(requests, greedy, use_tqdm=False)]
    assert (drafts_of(engine) - before)[1] > 50
    assert drafted == stock
