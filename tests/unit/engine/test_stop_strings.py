"""Stop strings under speculation, with vLLM's front end and a real tokenizer.

A response ends at the same token as without drafts. A continued response finds a stop string that began before the
interruption.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest, FinishReason
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.outputs import LogprobsLists

from verl_rhyme import patches
from verl_rhyme.engine import earlier_text
from verl_rhyme.processes.request import RequestMeta
from verl_rhyme.sampling.continuation import continued_options

KINDS = list(RequestOutputKind)
PROMPT = [0, 1]


def byte_level(*pieces):
    """Return a tokenizer of all bytes and of ``pieces``, whose ids follow the 256 bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    longer = [piece[:end] for piece in pieces for end in range(2, len(piece) + 1)]
    vocabulary = {token: id for id, token in enumerate([*alphabet, *longer])}
    merges = [(piece[:-1], piece[-1]) for piece in longer]
    tokenizer = Tokenizer(models.BPE(vocabulary, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


TOKENIZER = byte_level("</search", "ab", "ba")


@pytest.fixture(scope="module", autouse=True)
def patched():
    """Apply the patch, as in each process of vLLM."""
    status = patches.apply(next(patch for patch in patches.VLLM if patch.name == "vllm_stop_strings"))
    assert status.state is patches.State.APPLIED, status


class Front:
    """vLLM's front end with one request; the test plays the engine."""

    def __init__(self, kind=RequestOutputKind.CUMULATIVE, stream_interval=1, prompt=PROMPT, **options):
        self.processor = OutputProcessor(TOKENIZER, log_stats=True, stream_interval=stream_interval)
        earlier_text.install(self.processor)
        self.kind, self.queue, self.outputs = kind, RequestOutputCollector(kind, "r-0"), []
        params = SamplingParams(max_tokens=99, logprobs=0, output_kind=kind, **options)
        request = EngineCoreRequest("r-0", prompt, None, params, None, 0.0, None, None, None, external_req_id="r")
        self.processor.add_request(request, None, None, 0, self.queue)

    def step(self, tokens, finish=None, experts=None):
        """Deliver the tokens of an engine step; the log-prob of each is its negative id."""
        if "r-0" not in self.processor.request_states:
            return
        rows = np.array(tokens)[:, None]
        lines = LogprobsLists(rows, -rows.astype(np.float32), np.ones(len(tokens), int), None)
        output = EngineCoreOutput("r-0", list(tokens), lines, finish_reason=finish, routed_experts=experts)
        self.processor.process_outputs([output])
        while (output := self.queue.get_nowait()) is not None:
            self.outputs += output.outputs

    def run(self, tokens, sizes, last=None):
        """Deliver tokens in steps of these sizes, then one by one; ``last`` is the finish reason of the last token."""
        sizes, at = list(sizes), 0
        while at < len(tokens):
            size = min(sizes.pop(0) if sizes else 1, len(tokens) - at)
            at += size
            self.step(tokens[at - size : at], last if at == len(tokens) else None)
        return self

    @property
    def result(self):
        """The client's view: ids, log-probs, text, cumulative log-prob, finish and stop reason."""
        if not self.outputs:
            return None
        last = self.outputs[-1]
        parts = self.outputs if self.kind is RequestOutputKind.DELTA else [last]
        ids = [id for part in parts for id in part.token_ids]
        pairs = [pair for part in parts for pair in zip(part.token_ids, part.logprobs, strict=True)]
        log_probs = [lines[id].logprob for id, lines in pairs]
        text = "".join(part.text for part in parts)
        return ids, log_probs, text, last.cumulative_logprob, last.finish_reason, last.stop_reason


def ids_of(text):
    return TOKENIZER.encode(text)


@settings(max_examples=200)
@given(
    text=st.text("ab<é", min_size=1, max_size=24),
    sizes=st.lists(st.integers(1, 9), max_size=12),
    kind=st.sampled_from(KINDS),
    stop=st.lists(st.text("ab<é", min_size=1, max_size=4), min_size=1, max_size=3),
    include=st.booleans(),
    min_tokens=st.integers(0, 6),
    interval=st.sampled_from([1, 3]),
    last=st.sampled_from([None, FinishReason.STOP, FinishReason.LENGTH]),
)
def test_response_ends_as_without_drafts(text, sizes, kind, stop, include, min_tokens, interval, last):
    tokens = ids_of(text)
    options = {"kind": kind, "stop": stop, "include_stop_str_in_output": include, "min_tokens": min_tokens}
    undrafted = Front(**options).run(tokens, [], last)
    drafted = Front(**options, stream_interval=interval).run(tokens, sizes, last)
    if undrafted.result is None or undrafted.result[-2] is None:  # neither ended: the outputs so far may differ
        assert drafted.result is None or drafted.result[-2] is None
    else:
        assert drafted.result == undrafted.result


def test_routed_experts_of_dropped_tokens_are_dropped():
    """There is one row for each computed position: the prompt's with the first token, then each token's input."""
    tokens = ids_of("x<y>z")
    front = Front(stop=["y"])
    front.step(tokens[:1], experts=np.arange(2)[:, None, None])
    front.step(tokens[1:], experts=np.arange(2, 2 + len(tokens) - 1)[:, None, None])
    assert len(front.outputs[-1].token_ids) == 3
    assert front.outputs[-1].routed_experts.ravel().tolist() == [0, 1, 2, 3]


@settings(max_examples=150)
@given(
    text=st.text("ab<é", min_size=2, max_size=40),
    cuts=st.lists(st.integers(1, 20), min_size=1, max_size=3),
    stop=st.lists(st.text("ab<é", min_size=1, max_size=9), min_size=1, max_size=3),
    min_tokens=st.integers(0, 12),
    slow=st.booleans(),
)
def test_continued_response_ends_as_an_uninterrupted_one(text, cuts, stop, min_tokens, slow):
    """This includes stops at the first token after an interruption, and stop strings across several ones."""
    tokens, options = ids_of(text), {"stop": stop, "min_tokens": min_tokens}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vllm.v1.engine.detokenizer.USE_FAST_DETOKENIZER", not slow)
        whole = Front(**options).run(tokens, [])
        expected = list(whole.outputs[-1].token_ids)
        made, ended = [], False
        for size in (*cuts, len(tokens)):
            params = continued_options(options, len(made), noise_by_position=True)
            front = Front(prompt=[*PROMPT, *made], **RequestMeta(resumed_tokens=len(made)).put(params))
            front.run(tokens[len(made) :][:size], [])
            made += front.outputs[-1].token_ids if front.outputs else []
            ended = bool(front.outputs) and front.outputs[-1].finish_reason == "stop"
            if ended or len(made) == len(tokens):
                break
    assert made == expected
    assert ended == (whole.outputs[-1].finish_reason == "stop")
    if ended:
        assert front.outputs[-1].stop_reason == whole.outputs[-1].stop_reason
