"""The agent of examples/agent: what verl's loop makes of its turns is what the model was trained on."""

import asyncio
import json
import random
import sys
from itertools import islice

import pytest
from transformers import AutoTokenizer
from verl.experimental.agent_loop.tool_parser import ToolParser
from verl.tools.function_tool import load_function_tools_from_path
from verl.utils.tokenizer.continuous_token_wiring import create_continuous_token_builder

from examples.agent import tasks
from examples.agent.reward import compute_score

FOLDER = "examples/agent"


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(f"{FOLDER}/model")


def test_turns_are_joined_as_in_the_supervised_texts(tokenizer):
    builder = create_continuous_token_builder(tokenizer, hf_model_type="qwen2")
    rng = random.Random(1)
    for _ in range(50):
        messages = tasks.conversation(tasks.draw(rng), rng)
        tokens = builder.build_initial_tokens(messages[:1], tools=[])
        for i, message in enumerate(messages[1:], 1):
            if message["role"] == "assistant":
                turn = [*tokenizer.encode(message["content"]), tokenizer.eos_token_id]
                tokens = builder.merge_assistant_tokens(tokens, turn).token_ids
            else:
                tokens = builder.merge_context_tokens(messages[:i], messages[: i + 1], tokens).token_ids
        assert [*tokens, *tokenizer.encode("\n")] == tokenizer.apply_chat_template(messages, return_dict=False)
        assert tokenizer.unk_token_id not in tokens


def test_an_agent_without_flaws_is_right(tokenizer, monkeypatch):
    """With verl's parser and the tool, which searches as long for the same again."""
    [tool] = load_function_tools_from_path(f"{FOLDER}/search.py")
    module = sys.modules[tool.fn.__module__]
    slept = []

    async def sleep(seconds):
        slept.append(seconds)

    monkeypatch.setattr(module.asyncio, "sleep", sleep)
    parser = ToolParser.get_tool_parser("qwen3_coder", tokenizer)

    async def search(person, relation):
        turn = tokenizer.encode(tasks.call(f"{relation} of {person}"))
        _, [call] = await parser.extract_tool_calls(turn, [tool.tool_schema])
        answer = await tool.call(json.loads(call.arguments))
        assert answer == f"the {relation} of {person} is {tasks.FACTS[relation, person]}."
        return tasks.FACTS[relation, person]

    async def answer(question):
        person = question.person
        for relation in question.relations:
            person = await search(person, relation)
        return person

    for question in islice(tasks.questions(1, "train"), 20):
        text = f"<think> good. </think> <answer> {asyncio.run(answer(question))} </answer> <|im_end|>"
        said = tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True)
        assert compute_score(None, said, question.answer()) == {"score": 1.0, "acc": 1.0}
        assert compute_score(None, said, "Nobody") == {"score": 0.1, "acc": 0.0}
        assert compute_score(None, said.replace("</answer>", ""), question.answer()) == {"score": 0.0, "acc": 0.0}
    assert asyncio.run(tool.call({"query": "of Ann"})) == tasks.UNKNOWN
    assert 0.05 <= min(slept) < 0.2
    assert 1 < max(slept) <= 2
    assert len({*slept}) <= len(tasks.FACTS) + 1


def test_splits_have_no_common_question():
    train, test = ({*islice(tasks.questions(1, split), 200)} for split in ("train", "test"))
    assert not train & test
