#!/bin/sh
# Trains a scorer that helps, judges it on problems that it has not seen, and searches with it: about five minutes on
# 2 cores for the bundled model.
#
#     sh examples/06_train_a_scorer.sh [FOLDER]
#
# With another model: add --model MODEL to each command, and problems with answers that it gets right sometimes, in
# place of pawn:scorer (docs/scorers.md says how many).
set -eu
folder=${1:-runs/own_scorer} limit=${LIMIT:-120} traces=${TRACES:-16}
puzzle="a = 17; b = 61; c = a * b; d = c - a; e = d * b; f = e + c; g = f * d; h = g - e; h?"  # answer: 25

# Samples traces, grades them, keeps the hidden states at the ends of their thoughts. A second start goes on.
gambit scorer collect --problems pawn:scorer --limit "$limit" --traces "$traces" --out "$folder/data"

# Trains on most of the problems; 15 % choose among recipes, and 25 % are kept for the judgement, which counts from 20
# problems with right and wrong traces on.
gambit scorer train --data "$folder/data" --out "$folder/scorer.safetensors" --test 0.25

# Judges: an AUC of 0.5 half-way is chance, from about 0.7 on a search begins to pay. --write puts it into the file,
# and searches trust the scorer accordingly.
gambit scorer eval "$folder/scorer.safetensors" --data "$folder/data" --write

# The same puzzle by plain voting, by token confidence, and by the new scorer.
for options in "--policy sc" "--scorer confidence" "--scorer $folder/scorer.safetensors"; do
    echo "$options: $(gambit solve --quiet --capacity 32 $options "$puzzle")"
done
