"""The ``vllm.general_plugins`` entry point. vLLM calls it early in each of its processes."""

from __future__ import annotations


def register() -> None:
    """Apply the vLLM patches (see ``patches/``). A refused patch is logged; `verl-rhyme doctor` explains it."""
    from verl_rhyme import patches

    patches.apply_vllm()
