"""Store and index of responses from earlier epochs, in private files.

Process: all that read or write the history. Engines: none.
"""
