#!/usr/bin/env bash
# All of a first look at long chains on one GPU: collections, scorers, a search. Runs by itself within LIMIT seconds.
#
#     bash benchmarks/long_chains/visit.sh MODEL SCRATCH [LIMIT]
#
# SETTLED names sizes, phrase and temperature; with SETTLED= they are chosen on development problems first.
# SCRATCH/results grows as figures come; SCRATCH/traces holds the collections; SCRATCH/all.done says that all is over.
set -uo pipefail
model=$1 scratch=$2 limit=${3:-1200}
settled=${SETTLED-chains:12+16+20/lines/0.7} counts=${COUNTS:-train=1260,dev=180,judge=360}
began=$(date +%s)
results=$scratch/results
mkdir -p "$results" "$scratch/traces"
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=src:. VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

now() { echo $(($(date +%s) - began)); }
log() { echo "[$(now) s] $*" | tee -a "$results/log.txt"; }

start_mps() {
  export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  nvidia-cuda-mps-control -d && log "MPS is on" || { log "no MPS"; unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY; }
}

# within SECONDS COMMAND…: ends a command that goes on after this second of the visit.
within() {
  local end=$(($1 - $(now))); shift
  [ "$end" -gt 5 ] || { log "no time for: $*"; return 1; }
  timeout -s INT -k 10 "$end" "$@"
}

search() {  # family scorer
  local family=$1 scorer=$2 shard pids=()
  python3 -m benchmarks.long_chains.questions "$scratch/traces" "$family" > "$scratch/$family.jsonl"
  heat=$(python3 -c "import json; print(json.load(open('$scratch/traces/settings.json'))['chosen']['$family'][0]['temperature'])")
  for shard in 1 2 3; do
    VLLM_CACHE_ROOT=$scratch/cache-search-$shard within "$((limit - 20))" python3 -m gambit bench -q \
      --recipe benchmarks/long_chains/search.yaml --benchmark "$scratch/$family.jsonl" --model "$model" --no-logs \
      --scorer "$scorer" --temperature "$heat" --shard $shard/3 --out "$scratch/search-$family-$shard" \
      > "$results/search-$family-$shard.txt" 2>&1 &
    pids+=($!); sleep 5
  done
  wait "${pids[@]}"
  for shard in 1 2 3; do
    tar cJf "$results/search-$family-$shard.tar.xz" -C "$scratch" "search-$family-$shard"
  done
  log "search of $family is over"
}

start_mps
within "$((limit * 55 / 100))" python3 -m benchmarks.long_chains.generate --model "$model" --out "$scratch/traces" \
  --scratch "$scratch" --until "$((began + limit * 46 / 100))" --end "$((began + limit * 46 / 100))" --kv-gib 22 \
  ${settled:+--settled "$settled"} --counts "$counts" > "$results/generate.txt" 2>&1
log "generate is over: $(tail -1 "$results/generate.txt")"
cp "$scratch/traces/settings.json" "$results/"
pkill -9 -f VLLM::EngineCore  # none may keep memory
( tar c -C "$scratch" traces | xz -T8 -4 | split -b 15500k - "$scratch/traces.tar.xz." && touch "$scratch/traces.packed" ) &
within "$((limit * 80 / 100))" python3 -m benchmarks.long_chains.judge --model "$model" --data "$scratch/traces" \
  --out "$results" --until "$((began + limit * 55 / 100))" --families chains --export-components 48 > "$results/judge.txt" 2>&1
log "judge is over: $(tail -1 "$results/judge.txt" | head -c 200)"
labels=$(python3 - "$results/judge.json" << 'EOF'
import json, sys
tried = json.load(open(sys.argv[1]))["chains"]["tried"]
by_line = {name: value["dev"] for name, value in tried.items() if name.startswith("mlp/line/")}
print(max(by_line, key=by_line.get).split("/")[-1])
EOF
)
scorer=$results/chains-$labels.safetensors
log "the scorer that ranks development problems best: $scorer"
[ ! -e "$scorer" ] || search chains "$scorer"
touch "$scratch/all.done"
log "over"
