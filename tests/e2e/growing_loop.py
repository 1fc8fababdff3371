"""Responses whose lengths grow, and shrink again, with a prompt's place in the data: as of a policy that learns to
reason, and then to be short. Tokens are the model's; where it ends is not its own."""

from verl.experimental.agent_loop.single_turn_agent_loop import SingleTurnAgentLoop

#: Prompts after which lengths have grown, have stayed, and are short again; tokens when short and when long.
GROWN, STAYED = 40, 60
SHORT, LONG = 12, 150
#: Of the samples of a prompt, in turn.
SPREAD = (0.75, 1.0, 1.25)


def tokens(index, sample):
    """Of a response."""
    grown = min(1.0, max(0.0, (index - 16) / (GROWN - 16))) if index < STAYED else 0.0
    return round((SHORT + grown * (LONG - SHORT)) * SPREAD[sample % len(SPREAD)])


class GrowingLoop(SingleTurnAgentLoop):
    async def run(self, sampling_params, **kwargs):
        said = tokens(int(kwargs["index"]), kwargs["session_id"])
        return await super().run({**sampling_params, "max_tokens": said, "ignore_eos": True}, **kwargs)
