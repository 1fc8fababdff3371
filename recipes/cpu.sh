# shellcheck shell=bash
# Environment variables for runs without a GPU; the configuration is recipes/config/platform/cpu.yaml.

# One thread per process: with two, operations wait for the other core (measured: up to 19 times slower). No
# compilation: it takes longer than it saves.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} TORCH_COMPILE_DISABLE=${TORCH_COMPILE_DISABLE:-1}
export VERL_PLATFORM=cpu HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false HYDRA_FULL_ERROR=${HYDRA_FULL_ERROR:-0}
# With the uni executor, vLLM's worker then runs in its engine process, which saves one import of vLLM.
export VLLM_ENABLE_V1_MULTIPROCESSING=0
export RAY_USAGE_STATS_ENABLED=0 RAY_DEDUP_LOGS=0 VERL_LOGGING_LEVEL=${VERL_LOGGING_LEVEL:-WARNING}
