"""Commands of ``verl-rhyme``, one a file; ``cli.py`` lists them.

Process: the command's. Engines: transformers.
"""
