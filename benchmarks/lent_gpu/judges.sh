#!/usr/bin/env bash
# What a verifier costs a generating engine; collections; a verifier by outcomes and one that goes on by values; what both
# say of the test and the held-out traces. About 700 s: 110 until the model is there, 50 until engines generate, then as
# long as COLLECT_UNTIL allows. Training beside the collection takes half of the GPU from it.
. "$(dirname "$0")/common.sh"
COLLECT_UNTIL=${COLLECT_UNTIL:-560} V1_SECONDS=${V1_SECONDS:-110} V2_SECONDS=${V2_SECONDS:-80} SHARDS=${SHARDS:-4}
options='{"own_process": true, "max_model_len": 2048, "kv_cache_memory_bytes": 10737418240}'
split="--validation 0.05 --test 0.1"
model=$W/model

train() { # train OUT DATA SECONDS FLAGS…
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True "$PY" -m gambit scorer train --architecture verifier --model "$model" \
    --out "$W/$1" --data "$2" --seconds "$3" --epochs 2 $split "${@:4}" > "$W/log/$1.txt" 2>&1
}

read_by() { # read_by VERIFIER: the logits of its thoughts, for simulated_search.py
  for part in test held; do
    "$PY" "$W/code/benchmarks/simulated_search.py" --data "$W/c/$part" --verifier "$W/$1" --model "$model" --better 0 \
      --islands 4 --warmup 240 --margins 2 --logits "$RESULTS/$part-$1.npz" --out "$RESULTS/$part-$1.json"
  done > "$W/log/read-$1.txt" 2>&1
}

say "judges begin"
unpack_vllm; start_mps; random_model
warm_up "$options" & warm=$!
VLLM_CACHE_ROOT=$W/cache-speed "$PY" "$W/code/benchmarks/verifier_speed.py" --out "$RESULTS/speed" --parts pooling \
  --beside 1,0.4:low > "$W/log/speed.txt" 2>&1 & speed=$!
real_weights 300 || exit 1
until_over 260 $warm
mv "$W/real/model.safetensors" "$model/model.safetensors"
until_over 205 $speed
say "engines start"
engines=()
for i in $(seq "$SHARDS"); do
  cp -r "$W/cache-0" "$W/cache-$i"
  VLLM_CACHE_ROOT=$W/cache-$i "$PY" "$W/code/benchmarks/judge_data.py" --model "$model" --train "$W/data/fit.jsonl" \
    --held "$W/data/held.jsonl" --test "$W/data/math500_dev.jsonl" --parts train,values,test,held --memory-ratio 0.1 \
    --engine-options "$options" --shard "$i/$SHARDS" --out "$W/c" --until $((T0 + COLLECT_UNTIL)) \
    > "$W/log/data-$i.txt" 2>&1 & engines+=($!)
  sleep 4
done
until_over $((COLLECT_UNTIL + 30)) "${engines[@]}"; say "engines are over"
for part in train test held; do "$PY" -m gambit scorer merge "$W/c/$part"-? --out "$W/c/$part" > "$W/log/merge-$part.txt" 2>&1; done
train outcomes "$W/c/train" "$V1_SECONDS"; say "a verifier by outcomes"
read_by outcomes & reading=$!
train values "$W/c/train" "$V2_SECONDS" --labels values --start "$W/outcomes"; say "and one that goes on by values"
"$PY" -m gambit scorer eval "$W/outcomes" "$W/values" --data "$W/c/test" --model "$model" --out "$RESULTS/verifier.json" \
  > "$W/log/eval.txt" 2>&1
read_by values
wait $reading
touch "$W/over"; say "judges are over"
