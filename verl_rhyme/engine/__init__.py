"""vLLM integration: server, proposer, sampler, worker extension. No other package touches vLLM's internals.

Process: vLLM's server and workers. Engines: verl, vllm, ray, torch.
"""
