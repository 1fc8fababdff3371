"""An agent loop as they are: slow tools, tools that raise, workers that die, attempts nobody hears of again, canned
answers, and none."""

import asyncio
import os
from pathlib import Path

from verl.experimental.agent_loop import AgentLoopOutput
from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

from verl_rhyme.agent_loop.session import current
from verl_rhyme.scheduling.attempts import Attempt
from verl_rhyme.scheduling.rollout import _ATTEMPTS as ATTEMPTS

#: A tool takes so long that a step that waits for it fails the test.
HANGS_S = 3600.0
CANNED_INDEX, CANNED_SAMPLE, CANNED_TOKENS = 3, 3, 7
#: The worker dies once, in the group's last update, which needs all that is left.
DIES_IN_STEP = 4


def canned(index, sample):
    return index % 4 == CANNED_INDEX and sample == CANNED_SAMPLE


def without_trajectory(index, sample):
    return (index % 4, sample) == (0, 3)


class UnreliableLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        sample, index = kwargs["session_id"], int(kwargs["index"])
        session = current()
        first_attempt = bool(session and session.name) and Attempt.named(session.name).attempt % ATTEMPTS == 0
        if canned(index, sample):
            prompt_ids = await self.ct_build_initial_tokens(list(kwargs["raw_prompt"]))
            return AgentLoopOutput(
                prompt_ids=prompt_ids,
                response_ids=[self.tokenizer.eos_token_id] * CANNED_TOKENS,
                response_mask=[0] * CANNED_TOKENS,
                response_logprobs=[0.0] * CANNED_TOKENS,
                num_turns=2,
                metrics={},
                extra_fields={"turn_scores": [], "tool_rewards": []},
            )
        if without_trajectory(index, sample):
            return []
        died = Path(os.environ["RUN_DIR"], "died")
        if kwargs["global_steps"] == DIES_IN_STEP and not died.exists():
            died.touch()
            os._exit(1)
        if first_attempt and (index % 4, sample) == (1, 1):
            await asyncio.sleep(HANGS_S)
        if first_attempt and (index % 4, sample) == (2, 2):
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        output = await super().run(sampling_params, **kwargs)
        failed = Path(os.environ["RUN_DIR"], f"failed-{index}")
        if (index % 4, sample) == (1, 2) and not failed.exists():
            failed.touch()
            raise ConnectionError("the sandbox is away")
        return output
