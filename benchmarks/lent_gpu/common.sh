# For a GPU that is lent for half an hour, without a network: sourced by the programs beside it.
#
# W (required) is a folder on that machine with: code/ (src and benchmarks of this repository), scripts/ (this folder),
# data/ (problems), description/ (configuration and tokenizer of the model: gguf_model.py --only description),
# vllm.tar.xz and site.tar.xz (vLLM and what it needs), and m/part.* with m/all once every part of the GGUF has come.
# Everything has a deadline in seconds since W/t0, and nothing asks anybody: a run must end well by itself.
: "${W:?the folder with everything}"
RESULTS=$W/results
mkdir -p "$RESULTS" "$W/log"
[ -f "$W/t0" ] || date +%s > "$W/t0"
T0=$(cat "$W/t0")
echo $$ > "$W/conductor.pid"
PY=${PY:-python3}
unset PYTHONDONTWRITEBYTECODE  # or every process compiles vLLM's thousands of modules anew
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONPATH=$W/code/src

now() { echo $(($(date +%s) - T0)); }

say() { echo "[$(now) s] $*" | tee -a "$W/log.txt"; }

# until_there SECOND FILE: waits for a file.
until_there() {
  while [ ! -e "$2" ] && [ "$(now)" -lt "$1" ]; do sleep 0.5; done
  [ -e "$2" ] || { say "NOT THERE: $2"; return 1; }
}

# until_over SECOND PID…: waits for processes, and ends those that go on after it.
until_over() {
  local limit=$1 pid
  shift
  for pid in "$@"; do
    while kill -0 "$pid" 2> /dev/null && [ "$(now)" -lt "$limit" ]; do sleep 0.5; done
    if kill -0 "$pid" 2> /dev/null; then say "ENDED by its limit: $pid"; kill -INT "$pid"; sleep 8; kill -KILL "$pid" 2> /dev/null; fi
  done
  true
}

unpack_vllm() {
  mkdir -p "$W/vsite" "$W/site"
  xz -dT16 -c "$W/vllm.tar.xz" | tar xf - -C "$W/vsite" &
  xz -dT16 -c "$W/site.tar.xz" | tar xf - -C "$W/site" &
  wait
  printf '%s/vsite\n%s/site\n' "$W" "$W" > "$($PY -c 'import site; print(site.getsitepackages()[0])')/zz_gpu_bundle.pth"
  $PY -m compileall -q -j 16 "$W/vsite" "$W/site" "$W/code/src" > /dev/null 2>&1
  say "vLLM is there"
}

# Without NVIDIA's MPS engines of several processes take turns on the GPU.
start_mps() {
  export CUDA_MPS_PIPE_DIRECTORY=$W/mps CUDA_MPS_LOG_DIRECTORY=$W/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  if nvidia-cuda-mps-control -d && timeout 60 "$PY" -c 'import torch; torch.zeros(1).cuda()'; then
    say "MPS is on"
  else
    say "NO MPS"
    echo quit | timeout 20 nvidia-cuda-mps-control
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
}

# In place of the real weights until those have come: vLLM compiles by the model's shape and path, so that its work can be
# kept (VLLM_CACHE_ROOT) and copied for every engine.
random_model() {
  mkdir -p "$W/model" && cp "$W"/description/* "$W/model/"
  $PY - "$W" << 'P'
import sys, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
folder = sys.argv[1]
with torch.device("cuda"):
    model = Qwen2ForCausalLM(Qwen2Config.from_pretrained(f"{folder}/model")).to(torch.bfloat16)
model.save_pretrained(f"{folder}/random", max_shard_size="8GB")
P
  mv "$W/random/model.safetensors" "$W/model/"
  say "random weights are there"
}

# warm_up OPTIONS (JSON, of the engines to come): so that they find compiled what they need in W/cache-0.
warm_up() {
  VLLM_CACHE_ROOT=$W/cache-0 "$PY" "$W/code/benchmarks/judge_data.py" --model "$W/model" --train "$W/data/held.jsonl" \
    --held "$W/data/held.jsonl" --test "$W/data/held.jsonl" --traces-at-once 512 --memory-ratio 0.1 --engine-options "$1" \
    --out "$W/warm" --limit 1 --max-new-tokens 16 --traces 2 --train-traces 2 --rollouts 2 > "$W/log/warm.txt" 2>&1
}

# real_weights SECOND: of the GGUF, once it is whole.
real_weights() {
  until_there "$1" "$W/m/all" || return 1
  cat "$W"/m/part.* > "$W/model.gguf" && rm -rf "$W/m"
  "$PY" "$W/code/benchmarks/gguf_model.py" "$W/model.gguf" "$W/real" --only tensors && say "real weights are there"
}
