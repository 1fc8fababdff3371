"""The draft head in the real engine: its rows, its training, and its failures."""

import os

import numpy as np
import pytest

from verl_rhyme.engine import draft_head

# The head is off by default. ONLY_SLOW cannot be imported where this file is a script.
RARE = pytest.mark.skipif(os.environ.get("RHYME_SLOW", "0") in ("", "0"), reason="runs with RHYME_SLOW=1")
pytestmark = [RARE, pytest.mark.xdist_group("exactness")]

PROMPTS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


@pytest.fixture(scope="module")
def engine(build_engine, write_history, tmp_path_factory):
    before, draft_head.SHARE = draft_head.SHARE, 1.0  # the runs are short
    folder = tmp_path_factory.mktemp("head") / "node"
    write_history(folder, [])
    built = build_engine(folder, drafting={"floor": 1e-3, "weigh_cost": False, "head": "new"})
    built.history_folder = folder
    yield built
    draft_head.SHARE = before


def generated(engine, n=16, **params):
    from vllm import SamplingParams

    params = SamplingParams(**{"temperature": 0.3, "max_tokens": 64, "ignore_eos": True, "detokenize": False, **params})
    outputs = engine.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS * n], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def proposer(engine):
    return engine.llm_engine.model_executor.driver_worker.worker.model_runner.drafter


def test_head_learns_the_policys_next_tokens(engine):
    """At T=1 no text repeats for long, so the head is the only source to learn from."""
    before = engine.collective_rpc("draft_totals")[0]
    for _ in range(6):
        generated(engine, temperature=1.0)
    after = engine.collective_rpc("draft_totals")[0]
    assert after["errors"] == 0
    updates, losses = (after[name] - before[name] for name in ("head_updates", "head_loss"))
    assert updates > 20
    assert 0 < losses / updates < 1.5, "a uniform guess of 12 tokens has a higher loss"


def test_hidden_states_belong_to_their_tokens(engine):
    """The mean log-probability of drawn tokens under their hidden states is the negative entropy."""
    head = proposer(engine)._head
    numbers = np.arange(head._trainer._end, head._trainer._end + len(generated(engine, temperature=0.3)) * 60)
    trainer, rows = head._trainer, head._inference.rows
    entry = rows.entry[trainer._token[numbers]]
    assert (entry >= 0).all()
    log_p = (trainer._hidden[numbers].float() @ rows.output.T / 0.3).log_softmax(-1)
    drawn, entropy = log_p.gather(1, entry[:, None])[:, 0].mean(), -(log_p.exp() * log_p).sum(-1).mean()
    assert float(drawn) == pytest.approx(-float(entropy), abs=0.1)
    shifted = log_p[1:].gather(1, entry[:-1, None])[:, 0].mean()
    assert float(shifted) < float(drawn) - 1, "states of other tokens have lower log-probabilities"


def test_saved_head_is_loaded_by_a_new_engine(engine, build_engine):
    head = proposer(engine)._head
    proposer(engine).weights_loaded()
    again = build_engine(engine.history_folder, drafting={"head": "new"})
    loaded = proposer(again)._head
    assert (loaded._head.outer.weight == head._head.outer.weight).all()
    assert loaded.steps == 0, "no hidden states yet"
    assert loaded._inference.rows is not None, "the file has the head's tokens"


def test_head_is_reset_between_measurements(engine):
    """A benchmark generates the same responses in each round."""
    head = proposer(engine)._head
    head.begin("new")
    assert head.training() == {"head_updates": 0, "head_loss": 0.0, "head_seconds": 0.0}
    for _ in range(3):
        generated(engine, temperature=1.0)
    assert head._inference.rows is not None
    assert head.training()["head_updates"] > 0
    assert 0 < head.training()["head_loss"] / head.updates < 4


def test_failing_head_is_turned_off_and_generation_continues(engine, monkeypatch, caplog):
    head = proposer(engine)._head

    def fail(*_):
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(head._inference, "propose", fail)
    before = engine.collective_rpc("draft_totals")[0]
    assert all(len(tokens) == 64 for tokens in generated(engine))
    after = engine.collective_rpc("draft_totals")[0]
    assert after["errors"] == before["errors"] + 1
    assert after["drafted"] > before["drafted"]
    assert head.steps == 0


def test_ranks_gather_the_rows_of_a_sharded_vocabulary(tmp_path):
    """With tensor parallelism the drafting rank has the rows of all shards."""
    import subprocess
    import sys

    ran = subprocess.run([sys.executable, __file__, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert "rows agree" in ran.stdout, ran.stdout[-2000:] + ran.stderr[-2000:]


def _rows_of_rank(worker):
    worker.model_runner.drafter.weights_loaded()
    rows = getattr(getattr(worker.model_runner.drafter._head, "_inference", None), "rows", None)
    return None if rows is None else (rows.tokens.tolist(), rows.output.tolist())


def _sharded(folder):
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM
    from vllm import LLM, SamplingParams

    from verl_rhyme.history.store import HistoryStore

    config = Qwen2Config(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        eos_token_id=None,
        bos_token_id=None,
    )
    model = Qwen2ForCausalLM(config)
    model.save_pretrained(f"{folder}/model")
    HistoryStore(f"{folder}/history", "tp", max_bytes=1 << 26, epochs=4).close()
    drafting = {"max_tokens": 8, "head": "new"}
    engine = LLM(
        model=f"{folder}/model",
        dtype="float32",
        enforce_eager=True,
        max_model_len=128,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        num_gpu_blocks_override=64,
        worker_extension_cls="verl_rhyme.engine.extension.RhymeWorkerMethods",
        speculative_config={
            "method": "custom_class",
            "model": "verl_rhyme.engine.proposer.HistoryProposer",
            "num_speculative_tokens": 8,
        },
        additional_config={"rhyme": {"drafting": drafting, "history_dir": f"{folder}/history", "namespace": "tp"}},
    )
    engine.collective_rpc("attach_proposer")
    params = SamplingParams(max_tokens=100, ignore_eos=True, detokenize=False, n=8)
    engine.generate([{"prompt_token_ids": [1, 2, 3]}], params, use_tqdm=False)
    (tokens, output), other = engine.collective_rpc(_rows_of_rank)
    assert other is None
    assert {t >= 128 for t in tokens} == {False, True}, "of both shards"
    torch.testing.assert_close(torch.tensor(output), model.lm_head.weight[tokens].detach())
    print("rows agree", len(tokens))


if __name__ == "__main__":
    import sys

    os.environ |= {"VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "HF_HUB_OFFLINE": "1"}
    os.environ |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCH_COMPILE_DISABLE": "1", "VERL_PLATFORM": "cpu"}
    _sharded(sys.argv[1])
