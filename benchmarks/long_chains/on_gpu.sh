# Sourced by the scripts of a visit, which set `scratch`, `results` and `began`: environment, log, MPS.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPATH=src:. VLLM_USE_FLASHINFER_SAMPLER=0 HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

now() { echo $(($(date +%s) - began)); }
log() { echo "[$(now) s] $*" | tee -a "$results/log.txt"; }

start_mps() {
  export CUDA_MPS_PIPE_DIRECTORY=$scratch/mps CUDA_MPS_LOG_DIRECTORY=$scratch/mps-log
  mkdir -p "$CUDA_MPS_PIPE_DIRECTORY" "$CUDA_MPS_LOG_DIRECTORY"
  if [ -e "$scratch/mps.on" ]; then return; fi
  if nvidia-cuda-mps-control -d; then touch "$scratch/mps.on"; log "MPS is on"; else log "no MPS"; stop_mps; fi
}

stop_mps() {
  [ ! -e "$scratch/mps.on" ] || { echo quit | timeout 20 nvidia-cuda-mps-control; rm "$scratch/mps.on"; }
  unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
}

# end_group PID…: ends what outlived a program that `timeout` began: engines are in its process group.
end_group() {
  local pid
  for pid in "$@"; do kill -9 -- "-$pid" 2> /dev/null; done
}
