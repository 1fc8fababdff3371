"""The draft head: its training, its training data, and drafts from its proposals."""

import copy

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.unit.drafting.engine import Engine
from verl_rhyme.config import DraftingConfig
from verl_rhyme.drafting.adaptive import AdaptiveDrafter
from verl_rhyme.drafting.head import DraftHead, HeadTrainer, PolicyRows, load, save
from verl_rhyme.drafting.head_inference import HeadInference

pytestmark = pytest.mark.xdist_group("kernels")

D, V = 16, 12


@pytest.fixture(autouse=True)
def same_noise():
    torch.manual_seed(0)


def rows(tokens=range(V), generator=None):
    generator = torch.Generator().manual_seed(1)
    output, embedding = torch.randn(V, D, generator=generator) * 3, torch.randn(V, D, generator=generator)
    tokens = torch.tensor(list(tokens))
    return PolicyRows.of(tokens, output[tokens], embedding[tokens], V)


def cycle(n, first=0):
    """Return states and tokens of a policy that counts: the token after t is t + 1."""
    tokens = (first + np.arange(n)) % V
    return rows().output[torch.from_numpy(tokens)], tokens


@pytest.mark.parametrize("half", [False, True])
def test_new_head_learns_the_policys_next_tokens(half):
    head = DraftHead(D)
    head.half = half
    trainer, inference = HeadTrainer(head, 1024, rate=3e-3), HeadInference(head, 4)
    hidden, tokens = cycle(1000)
    trainer.add(hidden, tokens, np.arange(-1, -1001, -1))  # each token follows the one before
    losses = [float(trainer.update(rows(), 1.0)) for _ in range(300)]
    assert losses[-1] < 0.1 < 1 < losses[0]
    inference.rows = rows()
    inference.begin(hidden[:3])
    latest, going = tokens[:3], np.arange(3)
    for position in range(4):
        named, probability = inference.propose(position, going, latest)
        assert (named[:, 0] == (latest + 1) % V).all()
        assert (probability[:, 0] > 0.5).all()
        latest = named[:, 0]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 5)), min_size=1, max_size=60), st.integers(40, 70))
@settings(max_examples=30, deadline=None)
def test_drawn_segments_are_adjacent_text_of_one_request(emitted, capacity):
    """Four texts grow in turn in a ring buffer, and all drawn pairs are adjacent."""
    trainer = HeadTrainer(DraftHead(D), capacity)
    latest, lengths = [-1] * 4, [0] * 4
    for text, count in emitted:
        tokens = 1000 * text + lengths[text] + np.arange(count)
        previous = -1 - np.arange(count)
        previous[0] = latest[text]
        numbers = trainer.add(torch.from_numpy(tokens).float()[:, None].expand(-1, D), tokens, previous)
        latest[text], lengths[text] = int(numbers[-1]), lengths[text] + count
    total = sum(lengths)
    assert len(trainer) == min(total, capacity)
    token, at, inside = trainer._drawn()
    assert inside[:, 0].all()
    both = inside[:, :-1] & inside[:, 1:]
    assert (token[:, 1:] - token[:, :-1])[both].tolist() == [1] * both.sum()
    assert (trainer._token[at] == token).all()
    assert (np.diff(inside.astype(int), axis=1) <= 0).all(), "positions after the end stay outside"


def test_non_finite_states_are_harmless():
    head = DraftHead(D)
    trainer, inference = HeadTrainer(head, 256), HeadInference(head, 4)
    hidden, tokens = cycle(200)
    hidden = hidden.clone()
    hidden[::7] = float("nan")
    trainer.add(hidden, tokens, np.arange(-1, -201, -1))
    for _ in range(20):
        trainer.update(rows(), 1.0)
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    inference.rows = rows()
    inference.begin(hidden[:2])
    named, probability = inference.propose(0, np.arange(2), tokens[:2])
    assert (named[0] == -1).all()
    assert (probability[0] == 0).all()
    assert (named[1] >= 0).all()


def test_tokens_without_rows_are_not_named_and_harmless():
    head = DraftHead(D)
    inference = HeadInference(head, 2)
    inference.rows = rows(range(3))
    hidden, _ = cycle(2)
    inference.begin(hidden)
    named, _ = inference.propose(0, np.arange(2), np.array([11, 1]))  # 11 has no row
    assert set(named.ravel().tolist()) <= {-1, 0, 1, 2}
    trainer = HeadTrainer(head, 64)
    trainer.add(hidden, np.array([11, 1]), np.array([-1, -2]))
    assert torch.isfinite(trainer.update(inference.rows, 1.0))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs need a GPU")
def test_gpu_graphs_match_the_cpu():
    """Batches grow and shrink, rows come in any order, parameters and rows change."""
    generator = torch.Generator().manual_seed(0)
    head = DraftHead(D)
    nn.init.normal_(head.outer.weight, std=0.3, generator=generator)
    on_gpu = copy.deepcopy(head).cuda()
    ours, expected = HeadInference(on_gpu, 3), HeadInference(head, 3)
    for turn, batch in enumerate((3, 1, 9, 4, 17)):
        some = rows(range(V - turn))
        moved = (part.cuda() for part in (some.tokens, some.output.bfloat16(), some.embedding.bfloat16()))
        ours.rows, expected.rows = PolicyRows.of(*moved, V), some
        with torch.no_grad():
            for trained in (head, on_gpu):
                trained.inner.weight.mul_(1.1)
        ours.refresh()
        ours.temperature = expected.temperature = 1 + turn / 4
        hidden = torch.randn(batch, D, generator=generator)
        ours.begin(hidden.cuda())
        expected.begin(hidden)
        latest = np.arange(batch, dtype=np.int32) % V
        for position in range(3):
            going = np.random.default_rng(position).permutation(batch)[: batch - position]
            if not len(going):
                continue
            named, probability = ours.propose(position, going, latest)
            wanted, likely = expected.propose(position, going, latest)
            assert np.abs(np.sort(probability[going]) - np.sort(likely[going])).max() < 0.05
            sure = going[likely[going, 0] > likely[going, 1] + 0.1]
            assert (named[sure, 0] == wanted[sure, 0]).all()
            latest = wanted[:, 0].copy()


class Scripted:
    """A head that names tokens by a rule and records its calls."""

    steps = 3

    def __init__(self, name):
        self.name, self.calls = name, []

    def propose(self, position, going, latest):
        self.calls.append((position, going.tolist(), latest[going].tolist()))
        named = np.full((len(latest), 2), -1, np.int32)
        for row in going:
            named[row, 0] = self.name(position, int(latest[row]))
        return named, np.where(named >= 0, 0.9, 0.0).astype(np.float32)


def engine_with(head, floor=0.1, rows=1):
    config = DraftingConfig(floor=floor, weigh_cost=False)
    return Engine(AdaptiveDrafter(config, lambda key: None, slots=8, vocabulary=100, head=head), rows=rows)


def drafts(head, prompts, limit=8, floor=0.1):
    """Return drafts of prompts without history."""
    engine = engine_with(head, floor, len(prompts))
    for i, prompt in enumerate(prompts):
        engine.start(str(i), prompt[:-1], bytes([i]) * 16)
    return list(engine.step({str(i): prompt[-1:] for i, prompt in enumerate(prompts)}, limit).values())


def test_head_alone_drafts_without_text():
    head = Scripted(lambda position, latest: latest + 10)
    assert drafts(head, [[1, 2, 3], [4, 5, 6]]) == [[13, 23, 33], [16, 26, 36]]
    assert head.calls == [(0, [0, 1], [3, 6]), (1, [0, 1], [13, 16]), (2, [0, 1], [23, 26])]


def test_text_continues_the_heads_tokens():
    """The head returns to the row's text, which then continues the draft."""
    head = Scripted(lambda position, latest: {0: 50, 1: 2, 2: 3}[position])
    draft = drafts(head, [[1, 2, 3, 4, 5, 6, 7, 60]], floor=0.01)[0]
    assert draft[:3] == [50, 2, 3]
    assert draft[3:4] == [4]


def test_draft_tokens_are_counted_by_their_source():
    head = Scripted(lambda position, latest: {0: 50, 1: 2, 2: 3}[position])
    engine = engine_with(head, floor=0.01)
    engine.start("a", [1, 2, 3, 4, 5, 6, 7])
    draft = engine.step({"a": [60]}, 8)["a"]
    engine.step({"a": [50, 2, 3, 4]}, 8, drafted=[len(draft)], accepted=[3])
    counts = engine.finish("a")
    assert draft == [50, 2, 3, 4]
    assert (counts.drafted_head, counts.accepted_head) == (2, 2), "50 and 2; that 3 follows 2 is in the text"
    assert (counts.drafted_own, counts.accepted_own) == (2, 1)


def test_rows_that_end_early_are_not_proposed_again():
    head = Scripted(lambda position, latest: -1 if latest == 3 else latest + 10)
    assert drafts(head, [[1, 2, 3], [4, 5, 6]]) == [[], [16, 26, 36]]
    assert [call[1] for call in head.calls] == [[0, 1], [1], [1]]


def test_limit_below_the_heads_steps_holds():
    head = Scripted(lambda position, latest: latest + 10)
    assert drafts(head, [[1, 2, 3]], limit=2) == [[13, 23]]


def test_tokens_outside_the_vocabulary_are_not_drafted():
    head = Scripted(lambda position, latest: 100)
    assert drafts(head, [[1, 2, 3]]) == [[]]


def test_drafter_learns_to_ignore_a_wrong_head():
    """The head names wrong tokens with probability 0.9, and the drafter soon drafts none of them."""
    head = Scripted(lambda position, latest: 99)
    engine, text = engine_with(head), np.random.default_rng(0).integers(0, 98, 1007)
    engine.start("a", text[:7])
    wrong = [99 in engine.step({"a": text[i : i + 1]}, 8)["a"] for i in range(7, 1007)]
    assert np.mean(wrong[:20]) > 0.5 > 0.05 > np.mean(wrong[-500:])


def test_head_is_loaded_as_saved_and_that_of_another_model_refused(tmp_path):
    written, read, path = DraftHead(D), DraftHead(D), tmp_path / "head.safetensors"
    torch.nn.init.normal_(written.outer.weight)
    save(path, written, np.arange(V), 7)
    counts, updates = load(path, read, V)
    assert (counts.tolist(), updates) == (list(range(V)), 7)
    assert torch.equal(read.outer.weight, written.outer.weight)
    with pytest.raises(ValueError, match="hidden size 16, but this model has 8"):
        load(path, DraftHead(8), V)
    with pytest.raises(ValueError, match="for 12 tokens, but this model has 13"):
        load(path, read, V + 1)
    torch.nn.init.constant_(written.inner.bias, float("nan"))
    save(path, written, np.arange(V), 7)
    with pytest.raises(ValueError, match="not all of its parameters are finite"):
        load(path, read, V)
    path.write_bytes(b"nonsense")
    with pytest.raises(ValueError, match="is not a draft head"):
        load(path, read, V)
    with pytest.raises(ValueError, match="is not a draft head"):
        load(tmp_path / "missing", read, V)
    assert torch.equal(read.outer.weight, written.outer.weight)
    assert [file.name for file in tmp_path.iterdir()] == [path.name]
