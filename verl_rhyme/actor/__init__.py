"""Training workers: training steps whose samples come in parts.

Process: verl's training workers. Engines: verl, torch.
"""
