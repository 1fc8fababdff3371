# verl's image for vLLM 0.24.0 (torch, vLLM, flash-attn, Transformer Engine, Megatron), and verl-rhyme in it.
#   docker build -t verl-rhyme . && docker run --gpus all --shm-size 16g -it verl-rhyme verl-rhyme doctor
FROM verlai/verl:vllm024.latest
WORKDIR /opt/verl-rhyme
COPY . .
# The image has every large dependency; pip may add small ones, and must change none of these.
RUN pip freeze | grep -iE "^(torch|vllm|transformers|ray|megatron-core)==" > /tmp/kept \
 && pip install --no-cache-dir verl==0.9.1 . --constraint /tmp/kept
