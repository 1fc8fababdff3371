"""Shapes of runs as arguments of ``verl-rhyme plan`` and ``simulate``: a few sizes, or a verl command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

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
#: Last part of the module that a verl command runs.
_MAIN = "main_ppo"


def of_arguments(arguments: Sequence[str]) -> Shape | None:
    """Return a run's shape; ``None`` if the arguments begin with a file. Raises ValueError if they make no shape."""
    first = arguments[0]
    if any(each.endswith(".sh") for each in arguments):
        raise ValueError("a script cannot be read: give sizes such as gpus=8, or `python -m verl.trainer.main_ppo ...`")
    if Path(first).is_file() or ("=" not in first and not first.startswith("python")):
        return None
    from verl_rhyme.commands.output import silenced
    from verl_rhyme.planning import shape

    main = next((i for i, each in enumerate(arguments) if each.removesuffix(".py").endswith(_MAIN)), None)
    if main is None:
        if any("=" not in each or "." in each.partition("=")[0] for each in arguments):
            raise ValueError("give sizes such as gpus=8, or `-- python -m verl.trainer.main_ppo ...`")
        return shape.Shape.parse(arguments)
    sizes = [each for each in arguments[:main] if "=" in each]
    from verl_rhyme.checks.preflight.compose import compose
    from verl_rhyme.checks.preflight.plan import read

    with silenced():
        config = compose(arguments[main + 1 :])
    plan = read(config)
    given = shape.of_run(config, plan.train_gpus, plan.standalone * plan.rollout_gpus, plan.gpus_per_node)
    given["tp"] = plan.replica_gpus
    return shape.Shape.parse(sizes, given)
