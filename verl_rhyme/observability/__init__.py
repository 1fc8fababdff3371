"""What a run did: the event log, the metrics computed from it, the live progress line and the final report.

Process: the trainer and the command's. Engines: none.
"""
