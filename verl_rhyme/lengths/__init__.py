"""Forecasts of response lengths, from earlier responses or by a ranker.

Process: the trainer and the coordinator. Engines: none.
"""
