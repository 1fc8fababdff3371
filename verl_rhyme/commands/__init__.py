"""Commands of ``verl-rhyme`` in separate modules; ``cli.py`` lists all commands.

Process: the command's. Engines: transformers.
"""
