"""vLLM's side: server, proposer, sampler, extension of its workers. Nothing else touches vLLM's internals.

Process: vLLM's server and workers. Engines: verl, vllm, ray, torch.
"""
