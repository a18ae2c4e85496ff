#!/usr/bin/env bash
# Waits for a visit at most SECONDS, and packs what it has so far into OUT: poll.sh SCRATCH OUT SECONDS
{
scratch=$1 out=$2 end=$(($(date +%s) + $3))
mkdir -p "$out"
while [ ! -e "$scratch/visit.done" ] && [ "$(date +%s)" -lt "$end" ]; do sleep 2; done
for text in "$scratch"/results/*.txt; do printf '== %s\n' "${text##*/}"; tail -n 4 "$text" | cut -c1-240; done
cat "$scratch/results/log.txt"
files() { find . -maxdepth 2 -type f -path './*-[0-9]*/*' ! -path './cache-*'; find results -type f; }
(cd "$scratch" && files | tar cJf "$out/results.tar.xz" -T -)
cp "$scratch"/traces.tar.xz.a[a-c] "$out/" 2> /dev/null
ls -la "$out"
nvidia-smi --query-gpu=memory.used,utilization.gpu --format=csv,noheader
if [ -e "$scratch/visit.done" ]; then echo VISIT OVER; else echo STILL RUNNING; fi
exit
}
