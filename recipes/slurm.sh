#!/usr/bin/env bash
# Starts a Ray cluster on the nodes of a Slurm job, runs a command on the first node, and ends the cluster with it:
#   sbatch --nodes=2 recipes/slurm.sh python -m verl.trainer.main_ppo +rhyme=full trainer.nnodes=2 ...
#   NNODES=16 sbatch --nodes=16 recipes/slurm.sh bash recipes/run_qwen32b_dapo.sh
# Submit it in the activated Python environment, from a folder that all nodes share: Slurm passes folder and variables
# on to all nodes, and Ray starts its workers with them. Options of sbatch replace those below (--gpus-per-node=4
# --time=2-0 --partition=NAME).
#   PORT=...                port of Ray on the first node; default: 20000 to 29999, by the number of the job
#   RAY_TMPDIR=/tmp/ray_ID  logs and sockets of Ray, on each node; a short path on a local disk
#   START_TIMEOUT=600       seconds until all nodes are connected
#SBATCH --job-name=verl-rhyme
#SBATCH --output=%x-%j.log
#SBATCH --open-mode=append
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --exclusive
#SBATCH --mem=0
#SBATCH --requeue
set -euo pipefail

[ $# -gt 0 ] || {
  echo "usage: sbatch --nodes=N recipes/slurm.sh COMMAND..." >&2
  exit 2
}
PORT=${PORT:-$((20000 + SLURM_JOB_ID % 10000))}
HEAD=$(hostname):$PORT # this script runs on the first node
export HEAD RAY_TMPDIR=${RAY_TMPDIR:-/tmp/ray_$SLURM_JOB_ID}
unset RAY_ADDRESS

# Without --cpu-bind=none the processes of a node share one core.
# shellcheck disable=SC2016  # each node expands its own variables
srun --cpu-bind=none --kill-on-bad-exit=0 bash -c '
  mkdir -p "$RAY_TMPDIR"
  if [ "$SLURM_NODEID" = 0 ]; then
    exec ray start --block --head --port="${HEAD##*:}" --num-cpus="$SLURM_CPUS_ON_NODE" --disable-usage-stats
  fi
  until ray status --address="$HEAD" > /dev/null 2>&1; do sleep 2; done
  exec ray start --block --address="$HEAD" --num-cpus="$SLURM_CPUS_ON_NODE"
' &
CLUSTER=$!
trap 'kill "$CLUSTER" 2> /dev/null || true' EXIT

export RAY_ADDRESS=$HEAD
# shellcheck disable=SC2016  # its arguments
timeout "${START_TIMEOUT:-600}" bash -c '
  until ray status > /dev/null 2>&1; do
    kill -0 "$1" || exit # srun has failed
    sleep 2
  done
  python -c "
import ray, sys, time
ray.init(log_to_driver=False, logging_level=\"error\")
while sum(node[\"Alive\"] for node in ray.nodes()) < int(sys.argv[1]):
    time.sleep(2)
" "$2"
' wait "$CLUSTER" "$SLURM_JOB_NUM_NODES" || {
  echo "slurm.sh: Ray did not connect $SLURM_JOB_NUM_NODES nodes at $HEAD; set another PORT, or see $RAY_TMPDIR" >&2
  exit 1
}
"$@"
