"""Responses of earlier epochs on disk and as an index; private files.

Process: all that read or write them. Engines: none.
"""
