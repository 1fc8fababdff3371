"""The real engine on a model small enough to know its distribution exactly."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

# Helpers of the tests here, by their own names: site-packages has a `tests` of its own.
sys.path.insert(0, str(Path(__file__).parent))
import whole_run
from exact_distribution import VOCABULARY, letters

# Before vLLM is imported: one process, so that a test can break the sampler on purpose.
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")
# A second thread waits at every operation for whatever else has its core.
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VERL_PLATFORM", "cpu")

NAMESPACE = "test-vocabulary"


def pytest_runtest_teardown():
    """A run belongs to a test, or to a fixture that ends it before it returns."""
    whole_run.kill_left()


#: Groups that take minutes, the longest first.
LONG = ("exactness", "megatron_engine", "two_nodes")


def pytest_collection_modifyitems(items):
    """Training runs first, then the long groups: what is short fills up the workers' time at the end."""

    def place(item):
        if item.get_closest_marker("whole_run") is not None:
            return -1
        group = item.get_closest_marker("xdist_group")
        return LONG.index(group.args[0]) if group is not None and group.args[0] in LONG else len(LONG)

    items.sort(key=place)


@pytest.fixture(scope="session", autouse=True)
def without_amx():
    """With AMX, vLLM runs recurrent layers in bfloat16 alone, and never in chunks of a prompt."""
    import torch

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
        yield


@pytest.fixture(scope="session")
def small_model(tmp_path_factory):
    """Folder of a random Qwen2 over 12 tokens: far from uniform, and every token possible."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("small_model")
    torch.manual_seed(7)
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            max_position_embeddings=256,
            tie_word_embeddings=False,
            eos_token_id=None,
            bos_token_id=None,
            pad_token_id=None,
        )
    )
    with torch.no_grad():
        model.lm_head.weight.mul_(12)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def distribution_of(small_model):
    """``distribution_of(prompt, length, temperature, top_p, top_k)``: exact, shape [VOCABULARY] * length."""
    return distribution_of_model(small_model)


def loaded(folder, dtype):
    """Return a model as transformers computes it."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    kind = (
        AutoModelForImageTextToText
        if hasattr(AutoConfig.from_pretrained(folder), "vision_config")
        else AutoModelForCausalLM
    )
    return kind.from_pretrained(folder, dtype=dtype)


def distribution_of_model(folder, dtype="float64"):
    """The same for any model over these tokens."""
    import torch

    model = loaded(folder, dtype)

    @torch.no_grad()
    def distribution(prompt, length, temperature=1.0, top_p=1.0, top_k=0):
        prefixes = torch.empty(1, 0, dtype=torch.long)
        probabilities = torch.ones(1, dtype=torch.float64)
        for _ in range(length):
            tokens = torch.cat([torch.tensor(prompt).expand(len(prefixes), -1), prefixes], dim=1)
            logits = model(tokens).logits[:, -1].double() / temperature
            if top_k:
                logits = logits.masked_fill(logits < logits.topk(top_k).values[:, -1:], -torch.inf)
            if top_p < 1:
                ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
                outside = ordered.cumsum(-1) - ordered >= top_p
                logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
            probabilities = (probabilities[:, None] * logits.softmax(-1)).flatten()
            prefixes = torch.cat(
                [prefixes.repeat_interleave(VOCABULARY, 0), torch.arange(VOCABULARY).repeat(len(prefixes))[:, None]], 1
            )
        return probabilities.numpy().reshape([VOCABULARY] * length)

    return distribution


@pytest.fixture(scope="session")
def p_value():
    """``p_value(tokens, distribution)``: chi-square; cells with few expected samples are pooled.

    0 when one occurs of the unlikeliest, of which a million runs would see one together. What was least expected is
    printed, for a test that fails.
    """
    import numpy as np
    from scipy import stats

    def of(tokens, distribution):
        cells = np.ravel_multi_index(tokens.T, distribution.shape)
        counts = np.bincount(cells, minlength=distribution.size)
        expected = distribution.ravel() * len(tokens)
        order = np.argsort(expected)
        impossible = order[: np.searchsorted(expected[order].cumsum(), 1e-6)]
        print("sampled, expected, seen:")
        for cell in np.argsort(-np.abs(counts - expected) / np.sqrt(expected + 1e-9))[:8]:
            print([int(i) for i in np.unravel_index(cell, distribution.shape)], f"{expected[cell]:.3g}", counts[cell])
        if counts[impossible].sum():
            return 0.0
        rare = expected < 8
        observed = np.append(counts[~rare], counts[rare].sum())
        predicted = np.append(expected[~rare], expected[rare].sum())
        kept = predicted > 0
        return stats.chisquare(observed[kept], predicted[kept] * observed.sum() / predicted[kept].sum()).pvalue

    return of


@pytest.fixture(scope="session")
def build_engine(small_model):
    """``build_engine(history_dir=None, **vllm options)``: a vLLM engine, drafting where it is given a store.

    It draws with our sampler where it drafts, and where it is given ``draws=True``.
    """

    from verl_rhyme.history.reader import HistoryReader

    def build(history_dir=None, model=None, drafting=None, namespace=NAMESPACE, draws=False, **options):
        import torch
        from vllm import LLM

        from verl_rhyme.engine.model_drafter import speculation
        from verl_rhyme.engine.sampler import allow_all_options

        settings = {
            "dtype": "float32",
            "enforce_eager": True,
            "max_model_len": 128,
            "max_num_seqs": 64,
            "skip_tokenizer_init": True,
            "enable_prefix_caching": False,
            "seed": 0,
            "logprobs_mode": "processed_logprobs",  # as verl has it
            "num_gpu_blocks_override": 256,  # else a GiB of cache each, which a process keeps
            **({"gpu_memory_utilization": 0.1} if torch.cuda.is_available() else {}),
            **options,
        }
        if history_dir is not None or draws:
            settings.setdefault("worker_cls", "workers.WithMethods")
            settings.setdefault("worker_extension_cls", "verl_rhyme.engine.extension.RhymeWorkerMethods")
        if history_dir is not None:
            settings |= {
                "speculative_config": {
                    "method": "custom_class",
                    "model": "verl_rhyme.engine.proposer.HistoryProposer",
                    "num_speculative_tokens": (drafting or {}).get("max_tokens", 8),
                },
                "additional_config": {
                    "rhyme": {
                        # What is drafted here depends on no clock; whole runs read histories beside their engines.
                        "drafting": {
                            "max_tokens": 8,
                            "wait_for_history": True,
                            **(drafting or {}),
                        },
                        "history_dir": str(history_dir),
                        "namespace": namespace,
                    }
                },
            }
        if own := (drafting or {}).get("model"):
            settings["speculative_config"] = speculation(own, settings["speculative_config"]["num_speculative_tokens"])
        if draws:
            settings["additional_config"] = {"rhyme": {}}
        engine = LLM(model=str(model or small_model), **settings)
        if draws or history_dir is not None:
            assert set(engine.collective_rpc("install_sampler")) == {""}
            allow_all_options(engine.llm_engine)
        if history_dir is not None:
            assert all(engine.collective_rpc("attach_proposer"))
            if (drafting or {}).get("policy") == "paper":  # responses are short
                engine.llm_engine.model_executor.driver_worker.worker.model_runner.drafter._drafter._match = 1, 4
        return engine

    with pytest.MonkeyPatch.context() as patch:
        # A reader looks for a replaced store once a second; here at each access.
        patch.setattr(HistoryReader.__init__, "__defaults__", (0.0,))
        yield build


_WRITER = """
import json, sys
import numpy as np
from verl_rhyme.history.keys import prompt_key
from verl_rhyme.history.record import Trajectory
from verl_rhyme.history.store import HistoryStore

for line in sys.stdin:
    folder, namespace, responses = json.loads(line)
    store = HistoryStore(folder, namespace, max_bytes=1 << 24, epochs=2)
    store.clear()
    made = [Trajectory(prompt_key(p), np.asarray(r, np.int32), 1.0, 0, 0, i) for i, (p, r) in enumerate(responses)]
    if made:
        store.append(made, step=1)
    store.close()
    print("written", flush=True)
"""


@pytest.fixture(scope="session")
def stock(build_engine):
    """vLLM as it comes; it keeps nothing from one test to the next."""
    return build_engine()


@pytest.fixture(scope="session")
def plain(build_engine):
    """Our sampler without drafts; min-p and logit bias are there as in stock vLLM."""
    return build_engine(draws=True)


@pytest.fixture(scope="session")
def drafting(build_engine, write_history, tmp_path_factory):
    """An engine that drafts nearly every guess, whether it pays or not: exactness for good drafts alone is none.

    Each test writes the history that it needs to ``history_folder``. Tests that use the engine are of the group
    "exactness": then there is one.
    """
    folder = tmp_path_factory.mktemp("history") / "node"
    write_history(folder, [])
    engine = build_engine(folder, drafting={"floor": 1e-4, "weigh_cost": False})
    engine.history_folder = folder
    return engine


@pytest.fixture
def allow_grammars(monkeypatch):
    """``allow_grammars(*engines)``: the engines get a tokenizer, as those that verl starts have."""
    from vllm.tokenizers.hf import get_cached_tokenizer

    tokenizer = get_cached_tokenizer(letters(eos_token="l"))
    with ThreadPoolExecutor(1) as executor:

        def allow(*engines):
            for engine in engines:
                manager = engine.llm_engine.engine_core.engine_core.structured_output_manager
                monkeypatch.setattr(manager, "tokenizer", tokenizer, raising=False)
                monkeypatch.setattr(manager, "executor", executor, raising=False)
                monkeypatch.setattr(engine.llm_engine.renderer, "tokenizer", tokenizer)

        yield allow


@pytest.fixture(scope="session")
def write_history():
    """``write_history(folder, [(prompt, response), ...])`` replaces what a store holds (token ids)."""
    held = {}
    # In another process, as in training: LMDB wants one opening each.
    writer = subprocess.Popen([sys.executable, "-c", _WRITER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def write(folder, responses):
        message = json.dumps([str(folder), NAMESPACE, responses], default=int)
        if held.get(folder) != message:
            print(message, file=writer.stdin, flush=True)
            assert writer.stdout.readline() == "written\n", "the writer died"
            held[folder] = message

    yield write
    writer.stdin.close()
    writer.wait(timeout=60)
