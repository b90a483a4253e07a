#!/usr/bin/env bash
# Train on Slurm until max_iters, through time limits, preemption and lost nodes. In the repository's folder:
#   sbatch launch/slurm.sh config/train_gpt2.py --learning_rate=3e-4
#   sbatch --array=1-3 --job-name=gpt2 launch/slurm.sh config/train_gpt2.py  # seeds, in out-gpt2-seed-1 to -3
#   sbatch launch/slurm.sh launch/bandwidth.py                               # measures the network instead
# out_dir and the data must be on storage that all nodes share. See docs/launch.md.

# One torchrun on each node. Slurm signals this shell 120 seconds before the time limit.
#SBATCH --ntasks-per-node=1
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

# --- change these; options of sbatch, as in `sbatch --nodes=4 launch/slurm.sh`, override them ---
#SBATCH --nodes=2
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --mem=0
#SBATCH --time=24:00:00
##SBATCH --partition=NAME --account=NAME
# module load cuda; source .venv/bin/activate   # or before sbatch, which passes its environment to the job
# export NCCL_SOCKET_IFNAME=eth0 NCCL_IB_HCA=mlx5
container=${CONTAINER:-} # an image for Apptainer or Singularity, such as kilogpt.sif, in which Python runs
port=$((20000 + SLURM_JOB_ID % 10000)) # for torchrun on the first node; different for each job

# --- nothing below needs to change ---
set -u
job=$SLURM_JOB_ID
if [ -n "${SLURM_ARRAY_TASK_ID:-}" ]; then
    set -- "$@" --seed="$SLURM_ARRAY_TASK_ID" --out_dir="out-$SLURM_JOB_NAME-seed-$SLURM_ARRAY_TASK_ID"
    job=${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID # the number alone may mean the whole array
fi
program=(train.py --save_minutes=10 "$@" --init_from=auto)
case ${1:-} in launch/*) program=("$@") ;; esac
inside=(env) # runs a command as it is
if [ -n "$container" ]; then
    runtime=$(command -v apptainer || command -v singularity) || {
        echo "error: CONTAINER is '$container', but this node has neither apptainer nor singularity" >&2
        exit 1
    }
    inside=("$runtime" exec --nv --bind "$PWD" "$container")
fi
endpoint=$(hostname):$port # this shell runs on the first node
processes=$SLURM_GPUS_ON_NODE
# torchrun kills processes that take longer than this many seconds to save.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-110}

# Start a command on each node, with a log for each node, and wait for it. What srun says is kept in $said.
said=$(mktemp)
on_each_node() {
    local status tee
    exec 3> >(trap '' TERM && exec tee "$said" >&2)
    tee=$!
    srun --cpus-per-task="$SLURM_CPUS_PER_TASK" --kill-on-bad-exit=1 \
        --open-mode=append --output=slurm-%j-node%n.log "$@" 2>&3 &
    wait $!
    status=$?
    while kill -0 $! 2> /dev/null; do # a signal has interrupted wait, but srun still runs
        wait $!
        status=$?
    done
    exec 3>&-
    wait "$tee"
    return $status
}

# When the time is nearly over: send the signal to save to the steps of this job, but not to this shell.
# shellcheck disable=SC2317  # a trap calls this function
save_and_requeue() {
    requeue=yes
    scancel --signal=TERM "$job"
}
requeue=no
trap save_and_requeue USR1
trap : TERM # scancel and preemption signal the run, too: this shell waits until the run has saved

# Count the checkpoints in the nodes' logs, including the one that a stopped run saves.
count_saves() {
    cat slurm-"$SLURM_JOB_ID"-node*.log 2> /dev/null | grep -cE '^(checkpoint|stopped by) '
}

echo "start ${SLURM_RESTART_COUNT:-0} on $SLURM_JOB_NODELIST, rendezvous at $endpoint: ${program[*]}"
saves_before=$(count_saves)
# Each start has its own rendezvous: Slurm may be late in killing a torchrun of an earlier start, which must
# not join this start.
rendezvous=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
# shellcheck disable=SC2016  # the shell on each node expands $SLURM_...
on_each_node "${inside[@]}" bash -c 'exec python launch/check_node.py --name="$SLURMD_NODENAME" --node="$SLURM_NODEID" \
        --nodes="$SLURM_NNODES" "$@"' check --endpoint="$endpoint" --processes="$processes" "${program[@]}" &&
    on_each_node "${inside[@]}" torchrun --nnodes="$SLURM_NNODES" --nproc_per_node="$processes" --max-restarts=3 \
        --rdzv_backend=c10d --rdzv_endpoint="$endpoint" --rdzv_id="$rendezvous" "${program[@]}"
status=$?
echo "end of start ${SLURM_RESTART_COUNT:-0} with exit code $status"
description=$(scontrol show job "$job")
# In the grace period of a preemption, Slurm only signals the run, and the job must requeue itself.
[[ $description = *PreemptTime=None* ]] || requeue=yes
# A run that has saved since this start has made progress, so another start is worthwhile.
[[ $(count_saves) -le $saves_before ]] || requeue=yes
# SIGTERM and SIGKILL may come from Slurm, late and meant for an earlier start; but if every start is killed, for
# example for lack of memory, the restarts must end. The node that srun names first tells: whatever has ended it,
# srun terminates the others.
first_end=$(grep -m 1 -E 'error: .*: tasks? [0-9,-]+: ' "$said")
rm "$said"
killed=no
if [[ $first_end =~ (Terminated|Killed)$ && ${SLURM_RESTART_COUNT:-0} -lt 10 ]]; then
    killed=yes
fi
# A job that was cancelled, or that Slurm itself has requeued, is no longer RUNNING.
if [[ $status -ne 0 && $requeue$killed = *yes* && $description = *JobState=RUNNING* ]]; then
    [[ $killed = no ]] || echo "killed by a signal; another start"
    scontrol requeue "$job" # ends this shell, and starts it again
fi
exit $status
