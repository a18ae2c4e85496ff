#!/usr/bin/env bash
# Every figure that needs a GPU, one phase after the other; each can be called by itself.
#
#     OUT=DIR bash benchmarks/gpu_all.sh check speed                       # an H200: about 3 + 9 minutes
#     OUT=DIR MODEL=DIR DATA=DIR bash benchmarks/gpu_all.sh scorers bench  # about 7 + 12
#
# MODEL is a transformers folder (the figures here: Qwen2.5-Coder-1.5B-Instruct); DATA holds math_train.jsonl,
# math500_dev.jsonl and gsm8k_dev.jsonl, each line with id, question and answer. What is worth keeping ends up in
# OUT/results; OUT/log.txt says when each phase began and how it ended. A phase that fails does not stop the next.
# SPEED, SCORERS and BENCH are further flags for theirs. check and speed need no weights.
set -uo pipefail
cd "$(dirname "$0")/.."
: "${OUT:?where results go}"
python=${PYTHON:-python3}
export PYTHONPATH=src${PYTHONPATH:+:$PYTHONPATH} HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
mkdir -p "$OUT/results"

check() {
  "$python" benchmarks/vllm_cuda_check.py --out "$OUT/results/vllm_cuda_check.json"
}

speed() {
  "$python" benchmarks/gpu_speed.py --tokens 450 --phases overhead,reuse,profile,saturation ${SPEED:-} --out "$OUT/results/gpu_speed.json"
}

# What is judged by is collected first, then what is trained on, each until its seconds are up. The bench does not wait
# for the sequence scorer, which is fitted beside its start.
scorers() {
  scorer_recipe --out "$OUT/scorers" --only collect || return
  mkdir -p "$OUT/sequence" && ln -sfn "$OUT/scorers/data" "$OUT/sequence/data"
  scorer_recipe --out "$OUT/sequence" --only train --architectures sequence > "$OUT/sequence.txt" 2>&1 &
  scorer_recipe --out "$OUT/scorers" --only train --architectures mlp,mlp+confidence || return
  cp "$OUT/scorers/results/report.json" "$OUT/results/llm_scorers.json"
  cp "$OUT/scorers/results/best.safetensors" "$OUT/results/"
}

scorer_recipe() {
  "$python" benchmarks/scorer_recipe.py llm --model "$MODEL" --train "$DATA/math_train.jsonl" \
    --test "$DATA/math500_dev.jsonl" --max-new-tokens 1024 --temperature 0.8 --memory-ratio 0.4 --train-problems 2000 \
    --layers 14,20,-1 --seconds 200 --engine-options '{"own_process": true, "max_model_len": 2048}' ${SCORERS:-} "$@"
}

# Cut short by its time or by anything else, it leaves what it has, and a report of that.
bench() {
  timeout --signal INT "${BENCH_SECONDS:-780}" "$python" -m gambit bench --recipe benchmarks/llm_policies.yaml \
    --model "$MODEL" --scorer "${SCORER:-$OUT/scorers/results/best.safetensors}" --no-report --out "$OUT/bench" \
    --benchmark "$DATA/math500_dev.jsonl" --benchmark "$DATA/gsm8k_dev.jsonl" ${BENCH:-}
  "$python" -m gambit report "$OUT/bench" || return
  mkdir -p "$OUT/results/llm_policies" && cp -r "$OUT"/bench/report.* "$OUT/bench/figures" "$OUT/results/llm_policies/"
}

for phase in "$@"; do
  echo "$(date +%T) $phase begins" >> "$OUT/log.txt"
  "$phase" > "$OUT/$phase.txt" 2>&1
  code=$?
  echo "$(date +%T) $phase ended with $code" >> "$OUT/log.txt"
done
wait
if [ -f "$OUT/sequence/results/report.json" ]; then
  cp "$OUT/sequence/results/report.json" "$OUT/results/llm_scorers_sequence.json"
fi
