#!/usr/bin/env bash
# The planned comparison of plan.md on one GPU: settings from development problems, then plain sampling and Gambit on
# test problems until the time is over.
#
#     bash benchmarks/long_chains/primary.sh MODEL SCRATCH SCORER [LIMIT]
#
# SCRATCH/results grows as figures come; SCRATCH/all.done says that all is over.
set -uo pipefail
model=$1 scratch=$2 scorer=$3 limit=${4:-1300}
began=$(date +%s)
results=$scratch/results
mkdir -p "$results" "$scratch/settings"
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=src:. VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

now() { echo $(($(date +%s) - began)); }
log() { echo "[$(now) s] $*" | tee -a "$results/log.txt"; }
chosen() { python3 -c "import json; print(json.load(open('$scratch/settings/settings.json'))['chosen']['chains'][0]['$1'])"; }

export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d && log "MPS is on" || { log "no MPS"; unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY; }

if [ -z "${SETTINGS:-}" ]; then
  timeout -k 10 $((limit / 3)) python3 -m benchmarks.long_chains.generate --model "$model" --out "$scratch/settings" \
    --scratch "$scratch" --families chains --phrases lines --only-settings --kv-gib 22 > "$results/settings.txt" 2>&1
  pkill -9 -f VLLM::EngineCore  # none may keep memory
  cp "$scratch/settings/settings.json" "$results/"
  SETTINGS=$(chosen size)/$(chosen temperature)
fi
size=${SETTINGS%/*} heat=${SETTINGS#*/}
log "chains:$size at temperature $heat"
pids=()
for shard in 1 2 3; do
  VLLM_CACHE_ROOT=$scratch/cache-$shard timeout -s INT -k 10 $((limit - $(now) - 25)) python3 -m gambit bench -q \
    --recipe benchmarks/long_chains/search.yaml --benchmark "chains:$size" --limit 1200 --model "$model" --no-logs \
    --scorer "$scorer" --temperature "$heat" --shard $shard/3 --out "$scratch/search-$shard" \
    > "$results/search-$shard.txt" 2>&1 &
  pids+=($!); sleep 5
done
wait "${pids[@]}"
for shard in 1 2 3; do tar cJf "$results/search-$shard.tar.xz" -C "$scratch" "search-$shard"; done
touch "$scratch/all.done"
log "over"
