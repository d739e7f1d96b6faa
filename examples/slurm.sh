#!/bin/bash
# Trains on several machines with Slurm. A job that runs out of time, or makes room for another, is queued again and
# continues from its last checkpoint.
#
#     sbatch --nodes 8 --gpus-per-node 8 --time 4:00:00 examples/slurm.sh \
#         pretrain ./imagenet --batch-size 4096 --bn-groups 64 --out runs/imagenet
#
# The words are those of mixnn. --out is needed, on a disk that all machines share: a job that starts again looks there.
# PROCESSES is the number of processes per machine; by default one for each GPU.
#SBATCH --job-name=mixnn
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=B:USR1@120

first=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_JOB_NUM_NODES" --nproc-per-node "${PROCESSES:-gpu}" --max-restarts 3 \
    --rdzv-backend c10d --rdzv-endpoint "$first:${PORT:-29500}" --rdzv-id "$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}" \
    -m mixnn "$@" &

# Two minutes before the end of its time the job is queued again. Slurm then sends SIGTERM, and the run is saved.
trap 'scontrol requeue "$SLURM_JOB_ID"' USR1
wait $!
code=$?
while kill -0 $! 2> /dev/null; do  # `wait` returned because of the signal
    wait $!
    code=$?
done
exit $code
