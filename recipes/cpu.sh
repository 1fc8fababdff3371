# shellcheck shell=bash
# The environment of a run on a machine without a GPU; its configuration is in recipes/config/platform/cpu.yaml.

# One thread each: with two, every operation waits for whatever else has the second core (measured: up to 19 times
# slower). No compilation, which takes longer than it saves here.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=${HYDRA_FULL_ERROR:-0}
# With the uni executor this puts vLLM's worker into its engine process: one import of vLLM less.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARNING}
