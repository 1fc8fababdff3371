"""verl-rhyme: faster RL of language models on verl, without changing what is learned."""

__version__ = "0.2.0"
