#!/usr/bin/env bash
# What this machine makes of the template, in one table and less than 8 minutes: every engine's weights against
# one process's, bf16, fp16, running out of memory, host reads of a step, tokens per second against a plain loop
# and transformers.Trainer, peak memory. On all GPUs of the machine; where there is none, or with DEVICE=cpu, on
# 2 processes of the CPU, and what needs a GPU says so.
#
#     bash benchmarks/gpu.sh
#     DEVICE=cpu bash benchmarks/gpu.sh
set -u
cd "$(dirname "$0")/.." || exit 1
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
[ "${DEVICE:-}" = cpu ] && export CUDA_VISIBLE_DEVICES=-1
gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
prefix=$([ "$gpus" = 0 ] && echo cpu_)
processes=$([ "$gpus" = 0 ] && echo 2 || echo "$gpus")
limit=$([ "$gpus" = 0 ] && echo 900 || echo 200) # seconds of a part; on a CPU other programs may be in the way
folder=$(mktemp -d)

part() { # name, command: its output goes to a file, which the table names where it failed
    echo "$1 ..."
    timeout "$limit" "${@:2}" >"$folder/$1.log" 2>&1
}

part alone python benchmarks/gpu.py "$folder" alone
for layout in ddp zero1 zero2 zero3 fsdp2; do
    launch=(accelerate launch --config_file "accelerate_configs/$prefix$layout.yaml"
        --num_processes "$processes" --main_process_port 0)
    # accelerate starts no DDP of one process
    [ "$layout$processes" = ddp1 ] && launch=(torchrun --standalone --nproc_per_node 1)
    part "$layout" "${launch[@]}" benchmarks/gpu.py "$folder" "$layout"
done
part plain_loop env BLOCKS=16 python benchmarks/plain_loop.py
one=() # transformers.Trainer would spread one process over all devices that it sees
for name in CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES; do
    [ -n "${!name:-}" ] && one+=("$name=${!name%%,*}")
done
[ "${#one[@]}" = 0 ] && one=(CUDA_VISIBLE_DEVICES=0)
part compare env ROUNDS=1 "${one[@]}" python benchmarks/compare.py
python benchmarks/gpu.py "$folder"
status=$? # not 0 where something is missed
echo "output of each part: $folder"
exit $status
