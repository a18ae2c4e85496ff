#!/usr/bin/env bash
# Plain sampling against the search by a verifier (W/lora), all of both sets, two seeds; beside it votes by the verifier
# without a search, and rounds without a verifier. Two engines and one, each with a verifier of its own. While they start,
# the test problems are read by another verifier (W/other, if it is there), and values of prefixes are made for a state scorer
# (W/c8/train, a collection with eight traces of each problem in W/data/held.jsonl, if it is there).
. "$(dirname "$0")/common.sh"
UNTIL=${UNTIL:-620} SHARDS=${SHARDS:-2}
model=$W/model
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

bench() { # bench RECIPE NAME FLAGS…
  timeout --signal INT --kill-after 15 $((UNTIL - $(now))) "$PY" -m gambit bench --recipe "$W/code/benchmarks/$1.yaml" --model "$model" --no-report --no-logs --out "$W/b/$2" \
    --scorer "prm:gambit:$W/merged" --benchmark "$W/data/math500_dev.jsonl" --benchmark "$W/data/gsm8k_dev.jsonl" \
    "${@:3}" ${BENCH:-} > "$W/log/$2.txt" 2>&1
}

export_verifier() { "$PY" -m gambit scorer export "$W/lora" --model "$model" --out "$W/merged" > "$W/log/export.txt" 2>&1; }

# Both engines of a pair, so that those to come find compiled what they need in W/cache-0.
warm_up_pair() {
  export_verifier
  VLLM_CACHE_ROOT=$W/cache-0 bench llm_verifier warm --limit 1 --seeds 0 --max-new-tokens 8
  say "a pair has been warmed up: $(tail -n 1 "$W/log/warm.txt")"
}

state_values() {
  [ -d "$W/c8/train" ] || return
  VLLM_CACHE_ROOT=$W/cache-8 "$PY" "$W/code/benchmarks/judge_data.py" --model "$model" --engine "${ENGINE:-vllm}" \
    --train "$W/data/held.jsonl" --held "$W/data/held.jsonl" --test "$W/data/held.jsonl" --parts values --traces-at-once 512 \
    --memory-ratio 0.08 --engine-options "${OPTIONS:-$values_options}" --out "$W/c8" --until $((T0 + UNTIL - 60)) \
    ${COLLECT_FLAGS:-} > "$W/log/values.txt" 2>&1
  say "values: $(tail -n 1 "$W/log/values.txt")"
  for part in c8/train test; do
    "$PY" "$W/code/benchmarks/collection_states.py" "$W/$part" --model "$model" --layers="${LAYERS:--1,-9}" --out "$W/states/$part" > "$W/log/states.txt" 2>&1
  done
  for labels in outcomes values; do
    "$PY" -m gambit scorer train --objective ridge --labels $labels --data "$W/states/c8/train" --out "$W/ridge-$labels.safetensors" \
      --device cpu --validation 0.1 --test 0 > "$W/log/ridge-$labels.txt" 2>&1
  done
  "$PY" -m gambit scorer eval "$W"/ridge-*.safetensors --data "$W/states/test" --device cpu --out "$RESULTS/ridge.json" > "$W/log/ridge-eval.txt" 2>&1
  say "state scorers: $(tail -n 1 "$W/log/ridge-eval.txt")"
}
values_options='{"own_process": true, "exact_noise": false, "max_model_len": 2048, "kv_cache_memory_bytes": 4294967296}'

say "searches begin"
if [ -z "${IS_READY:-}" ]; then
  random_model & random=$!
  unpack_vllm; start_mps; wait $random
  warm_up_pair & warm=$!
  real_weights 300 || { touch "$W/over"; exit 1; }
  until_over 150 $warm
  rm -rf "$W/merged"
  mv "$W/real/model.safetensors" "$model/model.safetensors.new" && mv "$model/model.safetensors.new" "$model/model.safetensors"
fi
export_verifier; say "benches start: $(tail -n 1 "$W/log/export.txt")"
mkdir -p "$W/b"
pids=()
for i in $(seq "$SHARDS"); do
  [ ! -d "$W/cache-0" ] || cp -r "$W/cache-0" "$W/cache-$i"
  VLLM_CACHE_ROOT=$W/cache-$i bench llm_verifier "search-$i" --shard "$i/$SHARDS" & pids+=($!)
  sleep 3
done
[ ! -d "$W/cache-0" ] || cp -r "$W/cache-0" "$W/cache-7"
VLLM_CACHE_ROOT=$W/cache-7 bench llm_rounds rounds & pids+=($!)
sleep 3
(state_values) & states=$!
if [ -d "$W/other" ]; then
  "$PY" "$W/code/benchmarks/verifier_readings.py" read "values=$W/other" --data "$W" --model "$model" --out "$RESULTS" > "$W/log/read.txt" 2>&1
  say "read: $(tail -n 1 "$W/log/read.txt")"
fi
until_over $((UNTIL + 15)) "${pids[@]}"
until_over $((UNTIL + 20)) $states
touch "$W/over"; say "searches are over"
