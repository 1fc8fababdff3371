"""Shapes of runs as arguments of ``verl-rhyme plan`` and ``simulate``: a few sizes, or a verl command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from verl_rhyme.planning.shape import Shape

#: Parameter of both commands.
What = Annotated[
    list[str],
    typer.Argument(
        metavar="FILE [KEY=VALUE]... | SIZE=VALUE... [-- COMMAND]",
        help="A YAML file with overrides of its values; or a run's shape: gpu=h100 gpus=8 model=Qwen/Qwen3-8B "
        "batch=128 samples=16 response=8192, or gpu=h100 -- python -m verl.trainer.main_ppo ... Further sizes: prompt, "
        "mean (response tokens), entropy (nats per token), tp (of a replica), node (GPUs).",
    ),
]
#: Part of the module that a verl command runs.
_MAIN = "main_ppo"
_EXAMPLES = "give sizes such as gpus=8, or gpu=h100 -- python -m verl.trainer.main_ppo ..."
#: Tokens of a prompt, unless the command allows fewer.
_PROMPT = 512


def of_arguments(arguments: Sequence[str]) -> Shape | None:
    """Return a run's shape; ``None`` if the arguments begin with a file. Raises ValueError if they make no shape."""
    keys = [each.partition("=")[0] for each in arguments]
    is_size = ["=" in each and key.isidentifier() for each, key in zip(arguments, keys, strict=True)]
    count = is_size.index(False) if False in is_size else len(arguments)
    sizes, command = arguments[:count], arguments[count:]
    if any(each == "bash" or each.endswith(".sh") for each in command if "=" not in each):
        raise ValueError(f"a script cannot be read: {_EXAMPLES}")
    is_verl = any("=" not in each and _MAIN in each for each in command)
    if not is_verl and (Path(arguments[0]).is_file() or not (sizes or "=" in command[0])):
        return None
    from verl_rhyme.planning.shape import Shape

    return Shape.parse(sizes, _sizes(command) if command else None)


def _sizes(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the sizes of a verl command with these arguments."""
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.checks.preflight.plan import read
    from verl_rhyme.commands.output import silenced

    with silenced():
        config = compose(arguments)
    plan, data = read(config), config.data
    return {
        "gpus": plan.train_gpus + plan.standalone * plan.rollout_gpus,
        "model": str(config.actor_rollout_ref.model.path),
        "batch": int(data.train_batch_size),
        "samples": int(config.actor_rollout_ref.rollout.n),
        "response": int(data.max_response_length),
        "prompt": min(_PROMPT, int(data.max_prompt_length)),
        "tp": plan.replica_gpus,
        "node": plan.gpus_per_node,
    }
