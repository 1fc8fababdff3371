"""How long responses will be, from earlier ones or by a ranker.

Process: the trainer and the coordinator. Engines: none.
"""
