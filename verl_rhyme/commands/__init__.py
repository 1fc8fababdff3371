"""The commands of ``verl-rhyme`` that have a file of their own; ``cli.py`` lists all.

Process: the command's. Engines: transformers.
"""
