"""What only a machine without a GPU needs: verl's platform ``cpu``, and patches for it.

Process: all of a CPU run. Engines: verl, vllm, torch.
"""
