"""Prompt keys."""

import hashlib
import io
import os
import pickle
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from omegaconf import OmegaConf
from PIL import Image

from verl_rhyme.history.keys import KEY_BYTES, data_key, prompt_key, template_label, visit_label


def test_a_prompt_has_one_key_in_any_container():
    tokens = [1, 2, 151_643]
    key = hashlib.blake2b(struct.pack("<3i", *tokens), digest_size=16).digest()
    containers = (list, tuple, np.array, partial(np.array, dtype=">i8"), partial(np.array, dtype=np.int32))
    assert {prompt_key(kind(tokens)) for kind in containers} == {key}
    assert len({prompt_key(t) for t in ([], [0], [0, 0], [1, 0], [0, 1])}) == 5
    with pytest.raises(OverflowError, match="int32"):
        prompt_key([2**31])


def data_row(content, role="user", **columns):
    """Return a row of the data."""
    return {"raw_prompt": [{"role": role, "content": content}], **columns}


def picture(seed=0, size=(8, 6), kind=Image.Image):
    made = Image.fromarray(np.random.default_rng(seed).integers(0, 255, (*size, 3), dtype=np.uint8))
    if kind is Image.Image:
        return made
    file = io.BytesIO()
    made.save(file, "PNG")
    return {"bytes": file.getvalue(), "path": "7.png"} if kind is bytes else Image.open(file)


def image_row(image, text="find x"):
    """Return a row with an image in its messages, like verl's."""
    part = {"type": "image", **image} if isinstance(image, dict) else {"type": "image", "image": image}
    return data_row([part, {"type": "text", "text": text}])


def test_a_row_has_one_key_in_any_container():
    rows = [
        data_row("add 1 and 2", uid="a", index=3, data_source="d", tools_kwargs={}, extra_info={"index": 3}),
        data_row("add 1 and 2", uid="c", index=4, extra_info={"index": 4, "split": "test"}),
        {"raw_prompt": np.array(data_row("add 1 and 2")["raw_prompt"], dtype=object), "uid": "b", "tools_kwargs": None},
        {"raw_prompt": ({"content": "add 1 and 2", "name": None, "role": "user"},)},  # parquet adds None to a struct
    ]
    assert len({data_key(row) for row in rows}) == 1
    assert len(data_key(rows[0])) == 2 * KEY_BYTES


def test_rows_that_differ_have_other_keys():
    search = {"search": {"create_kwargs": {"corpus": "a"}}}
    rows = [
        {"raw_prompt": "one text"},
        *(data_row(content) for content in ("ab", ["a", "b"], [{"type": "text", "text": "ab"}], "\ud800")),
        data_row("ab", role="system"),
        {"raw_prompt": [*data_row("a")["raw_prompt"], *data_row("b")["raw_prompt"]]},
        data_row("ab", tools_kwargs=search),
        data_row("ab", tools_kwargs={"search": {"create_kwargs": {"corpus": "b"}}}),
        data_row("ab", interaction_kwargs=search),
        data_row("ab", extra_info={"index": 3, "tool_selection": ["search"]}),
        data_row("ab", extra_info={"seed": 3}),
        data_row("ab", extra_info={"seed": 4}),
        data_row("ab", multi_modal_data={"image": [picture()]}),
    ]
    assert len({data_key(row) for row in rows}) == len(rows)
    without_text = ({}, {"raw_prompt": None}, {"raw_prompt": []}, data_row(""), data_row(None), data_row([]))
    for row in (*without_text, {"prompts": [1, 2]}):
        assert data_key(row) == "", "its requests use a key of their token ids"


@pytest.mark.parametrize("kind", [Image.Image, bytes, "file"])
def test_one_text_with_other_images_is_another_prompt(kind):
    keys = [data_key(image_row(picture(seed, kind=kind))) for seed in (0, 1, 0)]
    assert keys[0] == keys[2] != keys[1]
    assert data_key(image_row(picture(0, (6, 8), kind))) != keys[0]
    assert data_key(image_row(picture(0, kind=kind), "find y")) != keys[0]
    sent = pickle.loads(pickle.dumps(image_row(picture(kind=kind))))
    assert data_key(sent) == keys[0], "in another process"


def test_media_of_every_kind_have_different_keys():
    wave = np.linspace(0, 1, 16, dtype=np.float32)
    tensors = [torch.zeros(size, dtype=kind) for size in (2, 3) for kind in (torch.uint8, torch.bfloat16)]
    media = {
        "video": ["a.mp4", "b.mp4", ["1.png", "2.png"], [picture(1), picture(2)]],
        "audio": [wave, wave[::-1], wave.astype(np.float64), (wave, 16_000)],
        "image": [Path("a.png"), *tensors, *(picture().convert(mode) for mode in ("L", "P", "RGBA"))],
    }
    parts = [{"type": kind, kind: each} for kind, of_kind in media.items() for each in of_kind]
    assert len({data_key(data_row([part])) for part in parts}) == len(parts)
    assert data_key(image_row("a.png")) == data_key(image_row(Path("a.png")))
    half = picture().crop((0, 0, 3, 3))
    assert data_key(image_row(half)) == data_key(image_row(half.copy()))


def test_unreadable_parts_are_left_out_of_the_key(caplog):
    broken = picture(kind=bytes)
    torn = Image.open(io.BytesIO(broken["bytes"][:60]))
    assert data_key(image_row(torn)) == data_key(image_row(torn)) != data_key(image_row(picture()))
    assert data_key(image_row(object())) == data_key(image_row(object()))
    endless = []
    endless.append(endless)
    for _ in range(2):
        assert data_key(data_row(endless)) == "", "its requests use a key of their token ids"
    assert caplog.text.count("RecursionError") == 1


def test_keys_are_the_same_in_every_process():
    row = "{'raw_prompt': 'a', 'tools_kwargs': {'b': {'d', 'c'}, 'a': 1.5}}"
    code = f"from verl_rhyme.history.keys import data_key; print(data_key({row}))"
    run = partial(subprocess.run, [sys.executable, "-c", code], capture_output=True, check=True)
    assert len({run(env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in "12"}) == 1


def test_another_template_or_other_options_change_the_key():
    tokenizer, processor = SimpleNamespace(chat_template="{{ a }}"), SimpleNamespace(chat_template="{{ b }}")
    labels = [
        template_label(tokenizer),
        template_label(tokenizer, options={"enable_thinking": False}),
        template_label(tokenizer, options=OmegaConf.create({"enable_thinking": True})),
        template_label(SimpleNamespace(chat_template={"default": "{{ a }}", "tool_use": ""})),
        template_label(tokenizer, processor),
        template_label(None),
    ]
    assert len({data_key(data_row("a"), label) for label in labels}) == len(labels)
    assert template_label(tokenizer, SimpleNamespace(chat_template=None), OmegaConf.create({})) == labels[0]


def test_a_visit_label_depends_on_the_uid_only():
    assert visit_label("a") == visit_label("a") != visit_label("b")
    assert all(0 <= visit_label(str(n)) < 1 << 31 for n in range(1000))
