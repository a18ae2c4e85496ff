#!/usr/bin/env bash
# One of the visits of visits.md, in the background of a machine with one GPU:
#
#     setsid bash benchmarks/long_chains/visit.sh 1 MODEL SCRATCH [LIMIT] > /dev/null 2>&1 < /dev/null &
#     bash benchmarks/long_chains/poll.sh SCRATCH OUT 540          # as often as it takes: what there is so far
#
# It ends by itself after LIMIT seconds. SCRATCH/results grows, SCRATCH/visit.done says that all is over.
# The braces have bash read all of it before it begins: the file may be replaced meanwhile.
{
set -uo pipefail
visit=$1 model=$2 scratch=$3 limit=${4:-1440}
began=$(date +%s)
results=$scratch/results here=benchmarks/long_chains
scorer=${SCORER:-$here/scorer.safetensors}
mkdir -p "$results"
. "$here/on_gpu.sh"

left() { echo $((limit - $(now) - 15)); }
# within SECONDS NAME COMMAND…: runs a command for at most so long and notes what became of it.
within() {
  local seconds=$1 name=$2 from; from=$(now); shift 2
  [ "$seconds" -lt "$(left)" ] || seconds=$(left)
  [ "$seconds" -gt 20 ] || { log "no time for $name"; return; }
  timeout -s INT -k 15 "$seconds" "$@" > "$results/$name.txt" 2>&1 &
  local program=$!
  wait $program
  log "$name: exit code $? after $(($(now) - from)) s"
  end_group $program
}
bench() { python3 -m gambit bench -q --no-report --no-logs "$@"; }
export -f bench

harder_problems() {
  export SETTINGS=${SETTINGS:-24/0.8} SCORER=$scorer
  NAME=harder bash $here/primary.sh "$model" "$scratch" $((limit * 64 / 100))
  NAME=tight RECIPE=$here/tight.yaml SEARCH=${TIGHT:-${SEARCH:-}} bash $here/primary.sh "$model" "$scratch" "$(left)"
}

pawn_engine='{"engine": "vllm", "memory_ratio": 0.1, "engine_options": {"own_process": true, "exact_noise": false,
  "max_model_len": 1024, "max_num_seqs": 1024, "max_cudagraph_capture_size": 1024,
  "kv_cache_memory_bytes": 4294967296}}'

puzzles() {  # beside the other searches, which are not timed
  export VLLM_CACHE_ROOT=$scratch/cache-pawn
  within 900 pawn-methods nice -n 5 bash -c 'bench "$@"' bench --recipe benchmarks/pawn_methods.yaml \
    --out "$scratch/pawn_methods-1" --engine vllm --memory-ratio 0.1 --engine-option own_process=true \
    --engine-option exact_noise=false --engine-option max_model_len=1024 --engine-option max_num_seqs=640 \
    --engine-option max_cudagraph_capture_size=640 --engine-option kv_cache_memory_bytes=4294967296 ${PAWN:-}
  within 600 pawn-forced nice -n 5 python3 benchmarks/forced_answers.py --puzzles 300 --capacity 16 --at-once 8 \
    --seconds $(($(left) < 600 ? $(left) - 40 : 560)) --engine "${PAWN_ENGINE:-$pawn_engine}" \
    --out "$results/pawn-forced.json" ${FORCED:-}
}

moves() {
  start_mps
  puzzles &
  FAMILY=moves NAME=moves SEARCH="--policies sc,gambit ${SEARCH:-}" \
    bash $here/primary.sh "$model" "$scratch" "$limit"
  wait
}

other_methods() {
  local end=${1:-430} shard methods=single,sc,step,gambit,beam-search,dvts,particle-filtering,deepconf,slim-sc
  start_mps
  for shard in 1 2; do
    chains_methods "$end" $shard "methods-$shard" --policies $methods --shard $shard/2 &
    sleep "${PAUSE:-5}"
  done
  # Its rounds come one after the other: it has an engine and all the time.
  chains_methods "$end" 4 adaptive-1 --policies adaptive --limit 32 --concurrency 32 --block 32 \
    --engine-option kv_cache_memory_bytes=12884901888 &
  sleep "${PAUSE:-5}"
  VLLM_CACHE_ROOT=$scratch/cache-3 within "$end" chains-forced python3 benchmarks/forced_answers.py \
    --benchmark chains:16 --model "$model" --scorer "$scorer" --puzzles 160 --capacity 16 --at-once 8 \
    --search '{"temperature": 0.8, "top_p": 1.0, "top_k": 0, "max_new_tokens": 2048, "system_prompt": ""}' \
    --engine "${CHAINS_ENGINE:-$chains_engine}" --seconds $((end - 90)) \
    --out "$results/chains-forced.json" ${FORCED:-} &
  wait
  stop_mps
}
chains_methods() {  # SECONDS CACHE NAME OPTIONS…
  local seconds=$1 cache=$2 name=$3; shift 3
  VLLM_CACHE_ROOT=$scratch/cache-$cache within "$seconds" "$name" bash -c 'bench "$@"' bench \
    --recipe $here/methods.yaml --model "$model" --scorer "$scorer" --benchmark chains:16 --temperature 0.8 \
    --out "$scratch/$name" "$@" ${METHODS:-}
}
chains_engine='{"engine": "vllm", "memory_ratio": 0.2, "engine_options": {"own_process": true, "exact_noise": false,
  "max_model_len": 3072, "max_num_seqs": 1024, "max_cudagraph_capture_size": 1024,
  "kv_cache_memory_bytes": 25769803776}}'

speed_and_faults() {
  within 455 forest python3 benchmarks/forest_speed.py --out "$results" --seconds 440 --shapes qwen3-4b --verdict \
    --gate-seconds 100 ${FOREST:-}
  within 290 speed python3 benchmarks/gpu_speed.py --out "$results/speed.json" --max-seconds 270 --phases overhead \
    --tokens 410 ${SPEED:---shapes qwen3-next-4b,qwen3-4b --adapters qwen3-4b}
  within 235 faults python3 benchmarks/gpu_faults.py --out "$results/faults.json" --seconds 220 \
    ${FAULTS:---together 4} &
  within 235 cuda-check python3 benchmarks/vllm_cuda_check.py --out "$results/cuda_check.json" --seconds 220 \
    --parts "${PARTS:-states,branch,repeat,layers,pressure,recorded,fused,confidence,own process,forest,pawn}" &
  within 235 quantised python3 benchmarks/quantised_check.py --out "$results/quantised.json" &
  wait
}

case $visit in
  1) harder_problems ;;
  2) moves ;;
  3) other_methods; speed_and_faults ;;
  *) echo "there are visits 1, 2 and 3" >&2; exit 2 ;;
esac
stop_mps
log "visit $visit is over"
touch "$scratch/visit.done"
exit
}
