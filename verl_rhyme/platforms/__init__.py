"""verl's platform for machines without a GPU.

Process: all of a CPU run. Engines: verl, torch.
"""
