#!/usr/bin/env bash
# Several machines under slurm, one launcher on each. From the repository's root, on a disk that all machines see:
#
#     OUTPUT_DIR=runs/mine sbatch recipes/slurm.sh --config recipes/qwen_7b_nvidia.yaml [flags of train.py]
#
# 120 seconds before its time is up slurm sends USR1 to this script, which hands it to one process: all finish
# the step, save and exit, and the job is queued again. It goes on from there, on any number of machines.
#SBATCH --job-name=adaptive
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --time=12:00:00
#SBATCH --signal=B:USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
set -u
export LAYOUT=${LAYOUT:-multi_node} # or zero3, fsdp2, ...: a file of accelerate_configs/
export PROCESSES=$((SLURM_NNODES * ${PROCESSES_PER_NODE:-8}))
export HOST=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export OUTPUT_DIR=${OUTPUT_DIR:-runs/slurm_$SLURM_JOB_ID} LAUNCHER=.launcher_$SLURM_JOB_ID

srun bash -c '
    [ "$SLURM_NODEID" = 0 ] && echo $$ >"$LAUNCHER" # this script runs on the same machine
    exec accelerate launch --config_file "accelerate_configs/$LAYOUT.yaml" --num_machines "$SLURM_NNODES" \
        --machine_rank "$SLURM_NODEID" --num_processes "$PROCESSES" --main_process_ip "$HOST" \
        --main_process_port "${PORT:-29500}" \
        train.py --output_dir "$OUTPUT_DIR" --resume_from_checkpoint auto "$@"' bash "$@" &
running=$! asked=

stop() { # one worker is enough; a second signal would end it at once
    [ -z "$asked" ] && asked=yes && pkill -USR1 -o -P "$(cat "$LAUNCHER")"
}
trap stop USR1
wait "$running"
status=$?
[ -n "$asked" ] && wait "$running" && status=$? # the first one ended with the signal
rm -f "$LAUNCHER"
[ -n "$asked" ] && [ "$status" = 0 ] && scontrol requeue "$SLURM_JOB_ID"
exit "$status"
