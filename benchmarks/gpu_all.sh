#!/usr/bin/env bash
# Every figure that needs a GPU, one phase after the other; each can be called by itself.
#
#     OUT=DIR bash benchmarks/gpu_all.sh check speed                                 # an H200: about 3 + 10 minutes
#     OUT=DIR MODEL=DIR DATA=DIR SHARDS=4 bash benchmarks/gpu_all.sh scorers bench report prefix_value
#     OUT=DIR MODEL=DIR DATA=DIR SHARDS=4 bash benchmarks/gpu_all.sh collect verifier    # about 8 + 8 minutes
#     … COLLECTED=DIR START=DIR bash benchmarks/gpu_all.sh verifier verifier_eval curve    # about 6 + 6 + 1 + 6 minutes
#     … bash benchmarks/gpu_all.sh settings    # which islands, swaps and warm-up; about 4 minutes
#     … bash benchmarks/gpu_all.sh verifier_bench; ROOM=90112 bash benchmarks/gpu_all.sh verifier_bench    # about 7 minutes each
#
# MODEL is a transformers folder (the figures here: Qwen2.5-Coder-1.5B-Instruct); DATA holds math_train.jsonl,
# math500_dev.jsonl and gsm8k_dev.jsonl, each line with id, question and answer. What is worth keeping ends up in
# OUT/results; OUT/log.txt says when each phase began and how it ended. A phase that fails does not stop the next.
# ROWS (1,024) is how many traces run at a time, on all engines together, and KV_BYTES (32 GiB) the memory of their KV caches.
# SPEED, SCORERS, VERIFIER and BENCH are further flags for theirs, ARCHITECTURES what scorers are fitted, SCORER what the
# bench uses where none was. check, speed and ray (two engines of pawn) need no weights. UNTIL, in seconds since the
# epoch, is when the bench stops.
#
# One engine keeps an H200 busy with a model of 4B; with one of 1.5B its host thread is the limit, and the GPU idle most
# of the time. SHARDS engines then share the GPU, each with its part of the problems and of the room; MPS=0 if not even
# NVIDIA's MPS should be tried.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?where results go}"
python=${PYTHON:-python3}
shards=${SHARDS:-1}
rows=$((${ROWS:-1024} / shards))
kv_bytes=$((${KV_BYTES:-2 ** 35} / shards))
architectures=${ARCHITECTURES:-mlp,mlp+confidence,sequence}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
unset PYTHONDONTWRITEBYTECODE  # or every process compiles vLLM's thousands of modules anew, for half a minute each
mkdir -p "$OUT/results"

check() {
  "$python" benchmarks/vllm_cuda_check.py --out "$OUT/results/vllm_cuda_check.json"
}

# Needs Ray's wheel; RAY is further flags: --kv-bytes 20GB, --file, --limit, --concurrency …
ray() {
  "$python" benchmarks/ray_two_engines.py ${MODEL:+--model "$MODEL"} ${RAY:-} --out "$OUT/results/ray_two_engines.json"
}

speed() {
  "$python" benchmarks/gpu_speed.py --shapes qwen3-4b,pawn --phases overhead,reuse,profile,saturation ${SPEED:-} \
    --out "$OUT/results/gpu_speed.json"
}

# What is judged by is collected first, then what is trained on, each until its seconds are up. With states of three layers two
# engines made 25,000 to 35,000 tokens/s on an H200 that had other work too; LAYERS=none stores none, and the model is not
# loaded a second time to compute them. What is there already is kept; COLLECTED=DIR takes the collections (train, test)
# from an earlier run; if that had all of math_train, `settings` would search problems that the judge was fitted to.
collect() {
  divide || return
  if [ -n "${COLLECTED:-}" ]; then mkdir -p "$OUT/scorers" && ln -sfn "$COLLECTED" "$OUT/scorers/data"; fi
  if [ -f "$OUT/scorers/data/train/collection.json" ]; then return; fi
  in_shards collect scorer_recipe --out "$OUT/scorers" --only collect || return
  if [ "$shards" -gt 1 ]; then
    for part in test train; do
      "$python" -m gambit scorer merge "$OUT/scorers/data/$part"-* --out "$OUT/scorers/data/$part" || return
      rm -r "$OUT/scorers/data/$part"-*
    done
  fi
}

# Every twelfth training problem is kept apart, for nothing but the choice of a search's settings.
divide() {
  awk 'NR % 12 != 6' "$DATA/math_train.jsonl" > "$OUT/math_fit.jsonl" &&
    awk 'NR % 12 == 6' "$DATA/math_train.jsonl" > "$OUT/math_held.jsonl"
}

# The bench does not wait for the sequence scorer, which is fitted beside its start.
scorers() {
  collect || return
  if [[ $architectures == *sequence ]]; then
    mkdir -p "$OUT/sequence" && ln -sfn "$OUT/scorers/data" "$OUT/sequence/data"
    scorer_recipe --out "$OUT/sequence" --only train --architectures sequence > "$OUT/sequence.txt" 2>&1 &
  fi
  scorer_recipe --out "$OUT/scorers" --only train --architectures "${architectures%,sequence}" || return
  cp "$OUT/scorers/results/report.json" "$OUT/results/llm_scorers.json"
  cp "$OUT/scorers/results/best.safetensors" "$OUT/results/"
}

scorer_recipe() {
  "$python" benchmarks/scorer_recipe.py --model "$MODEL" --train "$OUT/math_fit.jsonl" \
    --test "$DATA/math500_dev.jsonl" --max-new-tokens 1024 --temperature 0.8 --train-problems 2000 --layers "${LAYERS:-14,20,-1}" \
    --seconds 200 --memory-ratio "$(share 0.4)" --traces-at-once "$rows" --batch-tokens 32768 --graders 3 \
    --engine-options "{\"own_process\": true, \"max_model_len\": 2048, \"kv_cache_memory_bytes\": $kv_bytes}" \
    ${SCORERS:-} "$@"
}

# A verifier on the generator's weights and a state scorer beside it where the collection holds states, which
# `verifier_eval` judges on problems none of them has seen. START goes on from an adapter; its split must hold out no more
# than it did then.
# 60 k tokens/s are trained on an H200: an epoch over 1,253 problems × 8 takes 50 s, over all 2,000 90 s; VERIFIER_SECONDS
# bounds it. How far a search trusts either follows from held-out training problems: nothing of math500_dev, on which
# searches are judged, is written into them. The merged
# model, for whoever serves it, is as large as the generator and stays outside of OUT/results.
verifier() {
  local made="$OUT/verifier" split="${SPLIT:---validation 0.06 --test 0.14}" train
  collect || return
  train="$OUT/scorers/data/train"
  mkdir -p "$made"
  train_verifier --data "$train" --seconds "${VERIFIER_SECONDS:-300}" --out "$made/lora" $split \
    ${START:+--start "$START"} ${VERIFIER:-} &
  if has_states "$train"; then
    "$python" -m gambit scorer train --data "$train" --objective ridge $split \
      --out "$made/ridge.safetensors"
  fi
  wait $!
}

has_states() {
  ! grep -q '"layers": *\[\]' "$1/collection.json"
}

verifier_eval() {
  local made="$OUT/verifier"
  "$python" -m gambit scorer eval "$made/lora" --data "$OUT/scorers/data/test" \
    --model "$MODEL" --out "$OUT/results/verifier.json" || return
  "$python" -m gambit scorer export "$made/lora" --model "$MODEL" --out "$OUT/verifier_merged"
}

# Sequences of all lengths: the allocator must be able to give memory back in other sizes than it was asked for.
train_verifier() {
  PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True \
    "$python" -m gambit scorer train --architecture verifier --model "$MODEL" "$@"
}

# AUC by the number of problems trained on, two epochs each, judged on problems that none has seen: 160 s of training, 60 s
# of loading, 100 s of judging.
curve() {
  local data="$OUT/scorers/data" train folders=()
  collect || return
  train="$OUT/scorers/data/train"
  for count in ${CURVE:-100 200 400 800}; do
    folders+=("$OUT/curve/$count")
    train_verifier --data "$train" --train-problems "$count" --epochs 2 --seconds 120 \
      --out "$OUT/curve/$count" || return
  done
  "$python" -m gambit scorer eval "${folders[@]}" --data "$data/test" --model "$MODEL" \
    --out "$OUT/results/verifier_curve.json"
}

# Cut short by its time or by anything else, it leaves what it has.
bench() {
  in_shards bench bench_shard
}

report() {
  if [ "$shards" -gt 1 ]; then
    "$python" -m gambit merge "$OUT"/bench-? --out "$OUT/bench" || return
  fi
  "$python" -m gambit report "$OUT/bench" || return
  mkdir -p "$OUT/results/llm_policies" && cp -r "$OUT"/bench/report.* "$OUT/bench/figures" "$OUT/results/llm_policies/"
}

# Sampling against the search by what `verifier` made (or JUDGE, such as prm:gambit:DIR); LIMIT problems of each kind. With
# ROOM a KV cache of so many tokens on each engine, in a folder of its own: a quarter of C × concurrency × a plain trace's
# length is 90,112 for 64 pools of 16 traces of 350 tokens. AMPLE is the room without it.
verifier_bench() {
  judged_bench "verifier_bench${ROOM:+_$ROOM}" llm_verifier "${ROOM:-${AMPLE:-589824}}" "$DATA/math500_dev.jsonl" "$DATA/gsm8k_dev.jsonl"
}

# The same with several islands, swaps and warm-ups, on training problems that no judge was fitted to.
settings() {
  judged_bench settings llm_settings "${AMPLE:-589824}" "$OUT/math_held.jsonl"
}

# judged_bench NAME RECIPE ROOM FILE…
judged_bench() {
  local name=$1
  in_shards "$name" judged_shard "$@"
  if [ "$shards" -gt 1 ]; then
    "$python" -m gambit merge "$OUT/$name"-? --out "$OUT/$name" || return
  fi
  "$python" -m gambit report "$OUT/$name" || return
  mkdir -p "$OUT/results/$name" && cp -r "$OUT/$name"/report.* "$OUT/results/$name/"
}

judged_shard() {
  local name=$1 recipe=$2 room=$3 folder="$OUT/$1" problems=()
  shift 3
  while [ "$1" != --shard ]; do problems+=(--benchmark "$1"); shift; done
  [ "$shards" -eq 1 ] || folder="$OUT/$name-${2%/*}"
  timeout --signal INT --kill-after 25 "${BENCH_SECONDS:-420}" \
    "$python" -m gambit bench --recipe "benchmarks/$recipe.yaml" --model "$MODEL" --no-report --out "$folder" \
    --scorer "${JUDGE:-prm:gambit:$OUT/verifier/lora}" --limit "${LIMIT:-300}" \
    --kv-budget-tokens "$room" --engine-option max_num_seqs="$rows" \
    --engine-option kv_cache_memory_bytes=$((room * ${KV_TOKEN_BYTES:-32768})) \
    "${problems[@]}" ${BENCH:-} "$@"
}

# What a perfect judge of prefixes would bring: PROBLEMS (a .jsonl) cut at 25, 50 and 75 %, 8 rollouts each.
prefix_value() {
  in_shards prefix prefix_shard || return
  if [ "$shards" -gt 1 ]; then
    "$python" -m gambit scorer merge "$OUT"/prefix-? --out "$OUT/prefix" || return
    prefix_run --out "$OUT/prefix" || return
  fi
  mkdir -p "$OUT/results/prefix_value" && cp -r "$OUT"/prefix/report.* "$OUT/prefix/figures" "$OUT/results/prefix_value/"
}

prefix_shard() {
  local folder="$OUT/prefix"
  [ "$shards" -eq 1 ] || folder="$OUT/prefix-${2%/*}"
  prefix_run --out "$folder" "$@"
}

prefix_run() {
  local scorer=$OUT/results/best.safetensors
  [ -f "$scorer" ] || scorer=${SCORER:-confidence}
  [ "$scorer" = confidence ] || scorer="$scorer --scorer confidence"
  "$python" -m gambit prefix-value --benchmark "${PROBLEMS:-$DATA/math500_dev.jsonl}" --model "$MODEL" --engine vllm \
    --scorer $scorer --temperature 0.8 --top-p 1 --top-k 0 --max-new-tokens 1024 --graders 3 \
    --traces-at-once "$rows" --memory-ratio "$(share 0.4)" --engine-option own_process=true \
    --engine-option exact_noise=false --engine-option max_model_len=2048 \
    --engine-option kv_cache_memory_bytes="$kv_bytes" ${PREFIX:-} "$@"
}

bench_shard() {
  local folder="$OUT/bench" scorer=$OUT/results/best.safetensors
  [ "$shards" -eq 1 ] || folder="$OUT/bench-${2%/*}"
  [ -f "$scorer" ] || scorer=$SCORER
  timeout --signal INT --kill-after 25 "$((${UNTIL:-$(date +%s) + 780} - $(date +%s)))" \
    "$python" -m gambit bench --recipe benchmarks/llm_policies.yaml \
    --model "$MODEL" --scorer "$scorer" --no-report --out "$folder" \
    --benchmark "$DATA/math500_dev.jsonl" --benchmark "$DATA/gsm8k_dev.jsonl" --concurrency $((16 / shards)) \
    --block $((52 / shards)) --engine-option max_num_seqs="$rows" \
    --kv-budget-tokens $((104448 / shards)) --memory-ratio "$(share 0.1)" ${BENCH:-} "$@"
}

# in_shards NAME COMMAND…: the command with `--shard i/n`, for every i beside each other. What vLLM compiles for one is
# kept apart from the others', which write theirs at the same moment, and found again by the next phase; phases that run
# beside each other want a VLLM_CACHE_ROOT each.
in_shards() {
  local name=$1 pids=() failed=0
  shift
  if [ "$shards" -gt 1 ]; then share_gpu >> "$OUT/mps.txt" 2>&1; fi
  for shard in $(seq "$shards"); do
    VLLM_CACHE_ROOT="${VLLM_CACHE_ROOT:-$OUT/vllm}-$shard" "$@" --shard "$shard/$shards" > "$OUT/$name-$shard.txt" 2>&1 &
    pids+=($!)
  done
  for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
  return $failed
}

share() {
  "$python" -c "print(round($1 / $shards, 3))"
}

# Without NVIDIA's MPS the engines of several processes take turns on a GPU instead of sharing it. Only for those that
# share: nothing that is timed should go through it.
share_gpu() {
  if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] || [ "${MPS:-1}" != 1 ] || ! command -v nvidia-cuda-mps-control; then return; fi
  export CUDA_MPS_PIPE_DIRECTORY=$OUT/mps CUDA_MPS_LOG_DIRECTORY=$OUT/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  if nvidia-cuda-mps-control -d && timeout 60 "$python" -c 'import torch; torch.zeros(1).cuda()'; then
    echo "MPS is on" >> "$OUT/log.txt"
    trap stop_sharing EXIT
  else
    stop_sharing
  fi
}

stop_sharing() {
  echo quit | timeout 20 nvidia-cuda-mps-control
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  echo "MPS is off" >> "$OUT/log.txt"
}

for phase in "$@"; do
  echo "$(date +%T) $phase begins" >> "$OUT/log.txt"
  if [ -n "${CUDA_MPS_PIPE_DIRECTORY:-}" ] && [[ $phase == check || $phase == speed ]]; then stop_sharing; fi
  "$phase" > "$OUT/$phase.txt" 2>&1
  code=$?
  echo "$(date +%T) $phase ended with $code" >> "$OUT/log.txt"
done
wait
if [ -f "$OUT/sequence/results/report.json" ]; then
  cp "$OUT/sequence/results/report.json" "$OUT/results/llm_scorers_sequence.json"
fi
