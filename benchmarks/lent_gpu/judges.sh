#!/usr/bin/env bash
# What labels make of a verifier: collections, values of prefixes, then verifiers by outcomes and by values, one epoch
# each; what each says of the test, held-out and other problems. About 900 s, of which 190 until engines generate: they
# start with random weights while the real ones are on their way.
. "$(dirname "$0")/common.sh"
COLLECT_UNTIL=${COLLECT_UNTIL:-600} SHARDS=${SHARDS:-4} LAST=${LAST:-800} LEAST=${LEAST:-1000}
ENGINE=${ENGINE:-vllm} LAYERS=${LAYERS:--1,-9} SECONDS_EACH=${SECONDS_EACH:-240}
options=${OPTIONS:-'{"own_process": true, "exact_noise": false, "max_model_len": 2048, "kv_cache_memory_bytes": 8589934592}'}
split="--validation 0.05 --test 0.1"
model=$W/model
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

give_up() { say "GIVEN UP: $*"; touch "$W/over"; exit 1; }

train() { # train NAME FLAGS…
  [ "$(now)" -lt "$LAST" ] || { say "NO TIME for $1"; return; }
  local limit=$((LAST - $(now)))
  "$PY" -m gambit scorer train --architecture verifier --model "$model" --out "$W/$1" --data "$W/c/train" \
    --seconds $((limit < SECONDS_EACH ? limit : SECONDS_EACH)) --epochs 1 $split "${@:2}" > "$W/log/$1.txt" 2>&1
  say "$1: $(tail -n 1 "$W/log/$1.txt")"
}

read_by() { # read_by NAME
  [ -f "$W/$1/verifier.json" ] || return
  "$PY" "$W/code/benchmarks/verifier_readings.py" read "$1=$W/$1" --data "$W/c" --parts test,held,other --model "$model" --out "$RESULTS" > "$W/log/read-$1.txt" 2>&1
  say "read by $1: $(tail -n 1 "$W/log/read-$1.txt")"
}

get_ready() {
  random_model & local random=$!
  unpack_vllm; start_mps
  wait $random
}

# collector SHARD FLAGS…
collector() {
  VLLM_CACHE_ROOT=$W/cache-$1 "$PY" "$W/code/benchmarks/judge_data.py" --model "$model" --engine "$ENGINE" \
    --train "$W/data/fit.jsonl" --held "$W/data/held.jsonl" --test "$W/data/math500_dev.jsonl" \
    --other "$W/data/gsm8k_dev.jsonl" --parts train,held,test,other,values --held-traces 32 --memory-ratio 0.1 \
    --engine-options "$options" --shard "$1/$SHARDS" --out "$W/c" --until $((T0 + COLLECT_UNTIL)) \
    "${@:2}" ${COLLECT_FLAGS:-} > "$W/log/data-$1.txt" 2>&1
}

# With other weights than it began with an engine may be of no use: then it starts again.
collect_shard() {
  [ -z "${IS_READY:-}" ] || { collector "$1"; return; }
  collector "$1" --weights-at "$W/real_weights" && return
  say "engine $1 starts again: $(tail -n 1 "$W/log/data-$1.txt")"
  cp "$W/log/data-$1.txt" "$W/log/data-$1-first.txt"
  until_there 300 "$W/real_weights" && collector "$1"
}

merge() { # merge PART
  "$PY" -m gambit scorer merge "$W/c/$1"-? --out "$W/c/$1" > "$W/log/merge-$1.txt" 2>&1
}

# until_said SECOND TEXT: waits for every engine to say it.
until_said() {
  local i
  for i in $(seq "$SHARDS"); do
    while ! grep -q "$2" "$W/log/data-$i.txt" && [ "$(now)" -lt "$1" ] && kill -0 "${engines[$((i - 1))]}" 2> /dev/null; do sleep 0.5; done
  done
}

state_scorers() {
  local labels part
  for part in train test; do
    "$PY" "$W/code/benchmarks/collection_states.py" "$W/c/$part" --model "$model" --layers="$LAYERS" --out "$W/states/$part" > "$W/log/states-$part.txt" 2>&1
  done
  say "states are there"
  for labels in outcomes values; do
    "$PY" -m gambit scorer train --objective ridge --labels $labels --data "$W/states/train" --out "$W/ridge-$labels.safetensors" \
      --device cpu $split > "$W/log/ridge-$labels.txt" 2>&1
    say "ridge by $labels"
  done
  "$PY" -m gambit scorer eval "$W"/ridge-*.safetensors --data "$W/states/test" --device cpu --out "$RESULTS/ridge.json" > "$W/log/ridge-eval.txt" 2>&1
}

say "judges begin"
[ -n "${IS_READY:-}" ] || get_ready
say "engines start"
engines=()
for i in $(seq "$SHARDS"); do
  collect_shard "$i" & engines+=($!)
  sleep 3
done
if [ -z "${IS_READY:-}" ]; then
  real_weights 300 || give_up "no weights"
  mv "$W/real/model.safetensors" "$model/model.safetensors.new" && mv "$model/model.safetensors.new" "$model/model.safetensors"
  touch "$W/real_weights"
fi
until_said 480 ' train: '
merge train
count=$(grep -o '"gold"' "$W/c/train/index.jsonl" | wc -l)
[ "$count" -ge "$LEAST" ] || give_up "$count training problems: $(tail -n 2 "$W"/log/data-*.txt)"
say "$count training problems are there"
train outcomes
until_over $((COLLECT_UNTIL + 40)) "${engines[@]}"
pkill -KILL -f benchmarks/judge_data.py  # what outlived its shell
rm -rf "$W/c/train"; for part in train held test other; do merge $part & done; wait
say "collections are there: $(wc -l < "$W/c/train/values.jsonl") values"
(state_scorers) & states=$!
train values --labels values
for name in outcomes values; do read_by $name; done
until_over $((LAST + 60)) $states
touch "$W/over"; say "judges are over"
