#!/usr/bin/env bash
# The planned comparison of plan.md on one GPU: settings and a scorer from other problems, then plain sampling and Gambit
# on test problems until the time is over.
#
#     bash benchmarks/long_chains/primary.sh MODEL SCRATCH [LIMIT]
#
# With SETTINGS=SIZE/TEMPERATURE and SCORER=FILE of an earlier visit the comparison goes on: SEARCH="--problems …" names
# the problems that it has not done. SCRATCH/results grows as figures come; SCRATCH/all.done says that all is over.
set -uo pipefail
model=$1 scratch=$2 limit=${3:-1500}
counts=${COUNTS:-train=840,dev=160,judge=160} shards=${SHARDS:-3}
began=$(date +%s)
results=$scratch/results traces=$scratch/traces
mkdir -p "$results" "$traces"
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=src:. VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

now() { echo $(($(date +%s) - began)); }
log() { echo "[$(now) s] $*" | tee -a "$results/log.txt"; }
setting() { python3 -c "import json; print(json.load(open('$traces/settings.json'))$1)"; }

export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps-log
mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
nvidia-cuda-mps-control -d && log "MPS is on" || { log "no MPS"; unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY; }

if [ -z "${SETTINGS:-}" ]; then
  timeout -k 10 $((limit * 3 / 5)) python3 -m benchmarks.long_chains.judge --model "$model" --data "$traces" --wait \
    --out "$results" --families chains --layers 14,19 --rules line --labels outcome,balanced \
    --architectures mlp,ridge --until "$began" > "$results/judge.txt" 2>&1 &
  judge=$!
  end=$((began + limit * 30 / 100))
  timeout -k 10 $((limit * 2 / 5)) python3 -m benchmarks.long_chains.generate --model "$model" --out "$traces" \
    --scratch "$scratch" --families chains --kv-gib 22 --counts "$counts" --until $end --end $end \
    ${GENERATE:-} > "$results/generate.txt" 2>&1
  pkill -9 -f VLLM::EngineCore  # none may keep memory
  log "$(tail -1 "$results/generate.txt")"
  cp "$traces/settings.json" "$results/"
  ( tar c -C "$scratch" traces | xz -T8 -4 | split -b 15500k - "$scratch/traces.tar.xz." && touch "$scratch/traces.packed" ) &
  wait $judge
  log "$(tail -1 "$results/judge.txt" | head -c 200)"
  SETTINGS=$(setting "['search']['chains']")/$(setting "['chosen']['chains'][0]['temperature']")
  labels=$(python3 - "$results/judge.json" << 'EOF'
import json, sys
tried = json.load(open(sys.argv[1]))["chains"]["tried"]
two_layers = {name: value["dev"] for name, value in tried.items() if name.startswith("mlp/line/")}
print(max(two_layers, key=two_layers.get).split("/")[-1])
EOF
)
  SCORER=$results/chains-$labels.safetensors
  [ -e "$SCORER" ] || { log "no new scorer: that of the first look"; SCORER=benchmarks/long_chains/scorer.safetensors; }
fi
size=${SETTINGS%/*} heat=${SETTINGS#*/}
log "chains:$size at temperature $heat, scorer $SCORER"
pids=()
for shard in $(seq "$shards"); do
  VLLM_CACHE_ROOT=$scratch/cache-$shard timeout -s INT -k 10 $((limit - $(now) - 25)) python3 -m gambit bench -q \
    --recipe benchmarks/long_chains/search.yaml --benchmark "chains:$size" --limit 1200 --model "$model" ${SEARCH:-} \
    --scorer "$SCORER" --temperature "$heat" --shard "$shard/$shards" --out "$scratch/search-$shard" \
    > "$results/search-$shard.txt" 2>&1 &
  pids+=($!); sleep 5
done
wait "${pids[@]}"
log "searches are over"
for shard in $(seq "$shards"); do
  tar cJf "$results/search-$shard.tar.xz" -C "$scratch" --exclude logs "search-$shard"
done
python3 -m benchmarks.long_chains.races "$scratch" "$results/races.tar.xz" > "$results/races.txt" 2>&1
touch "$scratch/all.done"
log "over"
