"""Training workers: updates whose samples come in parts.

Process: verl's training workers. Engines: verl, torch.
"""
