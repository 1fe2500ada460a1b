#!/usr/bin/env bash
# Measure trees and the roofline on a GPU. Run from the root of the repository; interrupted commands keep their parts.
#
#     bash tools/gpu/trees_and_roofline.sh OUTPUT_FOLDER [SHAPE] [DTYPE]      (default: 7b, bfloat16)
#
# 1. Predicted and measured steps of a published shape with random weights, over batch sizes.
# 2. Phases of its step with Medusa and Hydra++ heads.
# 3. Tree search and overhead with the shipped model and its trained heads. Launching kernels takes most of its step, so
#    its best trees do not transfer to large models.
set -euo pipefail
out=$1 shape=${2:-7b} dtype=${3:-bfloat16}
export PYTHONPATH=$PWD  # a bare machine has no installed hydrajax
mkdir -p "$out"
quick=() ; context=1024 ; batches=1,2,4,8
if [ "$shape" = tiny ]; then quick=(--count 2 --calibration 4 --repeats 1 --sizes 1,2 --batch-sizes 1); context=128; batches=1; fi

python experiments/roofline_here.py --shape "$shape" --dtype "$dtype" --context "$context" \
    --batch-sizes "$batches" --output "$out/roofline_$shape.json"
for draft in medusa hydra++; do
    python -m hydrajax bench --random "$shape" --random-draft "$draft" --dtype "$dtype" --context "$context" \
        --tree-sizes 1,8,16,32,64 --batch-sizes "$batches" --json "$out/bench_${shape}_$draft.json"
done
python experiments/hydra_figures_7_to_9.py "${quick[@]}" --output "$out/hydra_figures_7_to_9.json"
[ "$shape" = tiny ] || python experiments/hydra_table_1.py --output "$out/hydra_table_1.json"
python -m hydrajax report "$out"
