#!/usr/bin/env bash
# Plain sampling against the search by a verifier (W/lora), all of both sets, two seeds, in an ample KV cache and in a quarter
# of it beside each other: three engines each, every one with a verifier of its own. 4,000 searches took 890 s.
. "$(dirname "$0")/common.sh"
UNTIL=${UNTIL:-930} SHARDS=${SHARDS:-3}
model=$W/model

bench() { # bench NAME SHARD ROOM TOGETHER MEMORY
  "$PY" -m gambit bench --recipe "$W/code/benchmarks/llm_verifier.yaml" --model "$model" --no-report --no-logs \
    --out "$W/b/$1-$2" --scorer "prm:gambit:$W/merged" --limit 300 --kv-budget-tokens "$3" --concurrency "$4" --block "$4" \
    --engine-option max_num_seqs=512 --engine-option kv_cache_memory_bytes=$(($3 * 32768)) --memory-ratio 0.12 \
    --verifier-memory "$5" --benchmark "$W/data/math500_dev.jsonl" --benchmark "$W/data/gsm8k_dev.jsonl" \
    --shard "$2/$SHARDS" > "$W/log/$1-$2.txt" 2>&1
}

say "searches begin"
unpack_vllm; start_mps; random_model
warm_up '{"own_process": true, "exact_noise": false, "max_model_len": 2048, "max_num_seqs": 512, "kv_cache_memory_bytes": 6442450944}' &
warm=$!
real_weights 300 || exit 1
until_over 150 $warm
mv "$W/real/model.safetensors" "$model/model.safetensors"
CUDA_VISIBLE_DEVICES='' "$PY" -m gambit scorer export "$W/lora" --model "$model" --out "$W/merged" > "$W/log/export.txt" 2>&1
say "benches start"
mkdir -p "$W/b"
number=0 pids=()
for i in $(seq "$SHARDS"); do
  # A quarter: of 67 pools of 16 traces of 350 tokens. Six pairs fill the GPU's memory.
  for what in "ample $i 196608 34 10GB" "quarter $i 94208 67 11GB"; do
    number=$((number + 1))
    cp -r "$W/cache-0" "$W/cache-$number"
    VLLM_CACHE_ROOT=$W/cache-$number bench $what & pids+=($!)
    sleep 3
  done
done
until_over "$UNTIL" "${pids[@]}"
touch "$W/over"; say "searches are over"
