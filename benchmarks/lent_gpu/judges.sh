#!/usr/bin/env bash
# What labels and ways of training make of a verifier and of a state scorer: collections (with hidden states), values of
# prefixes, then a verifier by outcomes, three that go on from it or begin anew, two trained in other ways
# (verifier_variants.py), ridge by outcomes and by values; what each says of the test, held-out and other problems.
# About 1,400 s: 110 until the model is there, 100 until engines generate, until COLLECT_UNTIL the collections.
. "$(dirname "$0")/common.sh"
COLLECT_UNTIL=${COLLECT_UNTIL:-730} FIRST=${FIRST:-110} MORE=${MORE:-80} SHARDS=${SHARDS:-4} LAST=${LAST:-1600}
ENGINE=${ENGINE:-vllm} LAYERS=${LAYERS:--1,-9} VARIANTS=${VARIANTS:-full implicit}
options=${OPTIONS:-'{"own_process": true, "max_model_len": 2048, "kv_cache_memory_bytes": 10737418240}'}
split="--validation 0.05 --test 0.1"
model=${MODEL:-$W/model}
export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True

train() { # train OUT SECONDS FLAGS…
  [ "$(now)" -lt "$LAST" ] || { say "NO TIME for $1"; return; }
  "$PY" -m gambit scorer train --architecture verifier --model "$model" --out "$W/$1" --data "$W/c/train" --seconds "$2" \
    --epochs 2 $split "${@:3}" > "$W/log/$1.txt" 2>&1
  say "$1: $(tail -n 1 "$W/log/$1.txt")"
}

variants() { "$PY" "$W/code/benchmarks/verifier_variants.py" --data "$W/c" --model "$model" --out "$RESULTS" "$@"; }

get_ready() {
  unpack_vllm; start_mps; random_model
  warm_up "$options" & local warm=$!
  real_weights 300 || exit 1
  until_over 260 $warm
  mv "$W/real/model.safetensors" "$model/model.safetensors"
}

collect() {
  local engines=() i
  for i in $(seq "$SHARDS"); do
    [ ! -d "$W/cache-0" ] || cp -r "$W/cache-0" "$W/cache-$i"
    VLLM_CACHE_ROOT=$W/cache-$i "$PY" "$W/code/benchmarks/judge_data.py" --model "$model" --engine "$ENGINE" \
      --train "$W/data/fit.jsonl" --held "$W/data/held.jsonl" --test "$W/data/math500_dev.jsonl" \
      --other "$W/data/gsm8k_dev.jsonl" --parts train,test,held,other,values --layers="$LAYERS" --memory-ratio 0.1 \
      --engine-options "$options" --shard "$i/$SHARDS" --out "$W/c" --until $((T0 + COLLECT_UNTIL)) \
      ${COLLECT_FLAGS:-} > "$W/log/data-$i.txt" 2>&1 & engines+=($!)
    sleep 4
  done
  until_over $((COLLECT_UNTIL + 40)) "${engines[@]}"
  for part in train test held other; do
    "$PY" -m gambit scorer merge "$W/c/$part"-? --out "$W/c/$part" > "$W/log/merge-$part.txt" 2>&1 &
  done
  wait
}

state_scorers() {
  local labels
  for labels in outcomes values; do
    "$PY" -m gambit scorer train --objective ridge --labels $labels --data "$W/c/train" --out "$W/ridge-$labels.safetensors" \
      $split > "$W/log/ridge-$labels.txt" 2>&1
    say "ridge by $labels"
  done
}

say "judges begin"
[ -n "${IS_READY:-}" ] || get_ready
say "engines start"
collect; say "collections are there"
(state_scorers) & ridge=$!
train outcomes "$FIRST"
train values "$MORE" --labels values --start "$W/outcomes"
train more-outcomes "$MORE" --start "$W/outcomes"
variants --read outcomes="$W/outcomes" values="$W/values" more-outcomes="$W/more-outcomes" > "$W/log/read.txt" 2>&1
say "three are read"
for name in $VARIANTS; do
  [ "$(now)" -lt "$LAST" ] || break
  variants --train "$name" --seconds "$MORE" > "$W/log/$name.txt" 2>&1; say "$name: $(tail -n 1 "$W/log/$name.txt")"
done
train values-alone "$FIRST" --labels values
variants --read values-alone="$W/values-alone" > "$W/log/read-alone.txt" 2>&1
until_over "$LAST" $ridge
for part in test other; do
  "$PY" -m gambit scorer eval $(ls -d "$W/outcomes" "$W/values" "$W"/ridge-*.safetensors) --data "$W/c/$part" --model "$model" \
    --out "$RESULTS/eval-$part.json" > "$W/log/eval-$part.txt" 2>&1
done
touch "$W/over"; say "judges are over"
