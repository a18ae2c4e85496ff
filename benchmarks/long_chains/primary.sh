#!/usr/bin/env bash
# A planned comparison of plan.md on one GPU: settings and a scorer from other problems, then plain sampling and Gambit
# on test problems until the time is over.
#
#     bash benchmarks/long_chains/primary.sh MODEL SCRATCH [LIMIT]
#
# FAMILY is chains or moves. With SETTINGS=SIZE/TEMPERATURE and SCORER=FILE of an earlier visit nothing is chosen again;
# RECIPE compares other methods under another NAME, SEARCH="--problems …" names the problems that were not done.
# SCRATCH/results grows as figures come; SCRATCH/NAME.done says that all is over. LAYERS, GENERATE and SEARCH make the
# whole small enough for a CPU: visits.md has an example.
# The braces have bash read all of it before it begins: the file may be replaced meanwhile.
{
set -uo pipefail
model=$1 scratch=$2 limit=${3:-1500}
family=${FAMILY:-chains} recipe=${RECIPE:-benchmarks/long_chains/search.yaml} name=${NAME:-search}
counts=${COUNTS:-train=840,dev=160,judge=160} shards=${SHARDS:-3} layers=${LAYERS:-14,19}
began=$(date +%s) searches=()
results=$scratch/results traces=$scratch/traces
mkdir -p "$results" "$traces"
. "$(dirname "$0")/on_gpu.sh"
start_mps

if [ -z "${SETTINGS:-}" ]; then
  timeout -k 10 $((limit * 3 / 5)) python3 -m benchmarks.long_chains.judge --model "$model" --data "$traces" --wait \
    --out "$results" --families "$family" --layers "$layers" --rules line --labels outcome,balanced \
    --architectures mlp,ridge --until "$began" > "$results/judge.txt" 2>&1 &
  judge=$!
  end=$((began + limit * 30 / 100))
  timeout -k 10 $((limit * 2 / 5)) python3 -m benchmarks.long_chains.generate --model "$model" --out "$traces" \
    --scratch "$scratch" --families "$family" --kv-gib 22 --counts "$counts" --until $end --end $end \
    ${GENERATE:-} > "$results/generate.txt" 2>&1 &
  generate=$!
  wait $generate
  end_group $generate  # no engine may keep memory
  log "$(tail -1 "$results/generate.txt")"
  [ -e "$traces/settings.json" ] || { log "no settings: read generate.txt"; touch "$scratch/$name.done"; exit 1; }
  cp "$traces/settings.json" "$results/"
  tar c -C "$scratch" traces | xz -T8 -4 | split -b 15500k - "$scratch/traces.tar.xz." &
  wait $judge
  log "$(tail -1 "$results/judge.txt" | head -c 200)"
  SETTINGS=$(python3 - "$traces/settings.json" "$family" << 'EOF'
import json, sys
found = json.load(open(sys.argv[1]))
print(f"{found['search'][sys.argv[2]]}/{found['chosen'][sys.argv[2]][0]['temperature']}")
EOF
)
  labels=$(python3 - "$results/judge.json" "$family" << 'EOF'
import json, sys
tried = json.load(open(sys.argv[1]))[sys.argv[2]]["tried"]
two_layers = {name: value["dev"] for name, value in tried.items() if name.startswith("mlp/line/")}
print(max(two_layers, key=two_layers.get).split("/")[-1])
EOF
)
  SCORER=$results/$family-$labels.safetensors
  [ -e "$SCORER" ] || { log "no new scorer: that of the first look"; SCORER=benchmarks/long_chains/scorer.safetensors; }
fi
size=${SETTINGS%/*} heat=${SETTINGS#*/}
log "$name: $family:$size at temperature $heat, scorer $SCORER"
search() {  # SHARD: until all problems are done or the time is over; an engine that failed is started again, twice
  local shard=$1 seconds program try
  for try in 1 2 3; do
    seconds=$((limit - $(now) - 25))
    [ "$seconds" -gt "${LEAST:-75}" ] || return
    VLLM_CACHE_ROOT=$scratch/cache-$shard timeout -s INT -k 10 "$seconds" python3 -m gambit bench -q --no-report \
      --recipe "$recipe" --benchmark "$family:$size" --model "$model" --scorer "$SCORER" --temperature "$heat" \
      --shard "$shard/$shards" ${SEARCH:-} $([ ! -e "$scratch/$name-$shard" ] || echo --resume) \
      --out "$scratch/$name-$shard" >> "$results/$name-$shard.txt" 2>&1 &
    program=$!
    wait $program && return
    log "$name, shard $shard, start $try: $(tail -1 "$results/$name-$shard.txt" | cut -c1-200)"
    end_group $program
  done
}
for shard in $(seq "$shards"); do
  search "$shard" &
  searches+=($!); sleep "${PAUSE:-5}"
done
wait "${searches[@]}"
log "$name is over: $(cat "$scratch/$name"-[0-9]*/rows.jsonl | wc -l) searches"
python3 -m benchmarks.long_chains.races "$scratch" "$results/$name-races.tar.xz" "$name" \
  > "$results/$name-races.txt" 2>&1
touch "$scratch/$name.done"
log "over"
exit
}
