#!/usr/bin/env bash
# Waits for a visit and copies what it has so far: poll.sh SCRATCH OUT SECONDS
scratch=$1 out=$2 end=$(($(date +%s) + $3))
while [ ! -e "$scratch/all.done" ] && [ "$(date +%s)" -lt "$end" ]; do sleep 2; done
tail -n 25 "$scratch"/results/*.txt | cut -c1-240
tar cJf "$out/results.tar.xz" -C "$scratch" results
[ ! -e "$scratch/traces.packed" ] || cp "$scratch"/traces.tar.xz.* "$out/"
ls -la "$out"; nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
[ -e "$scratch/all.done" ] && echo ALL DONE || echo STILL RUNNING
