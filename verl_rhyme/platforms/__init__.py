"""verl's platform for machines without a GPU.

Process: all of a run there. Engines: verl, torch.
"""
