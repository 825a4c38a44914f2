#!/bin/sh
# sh experiments/spec_models/train.sh [FOLDER]: makes the models of the studies of speculative decoding that are not
# there yet, in FOLDER (runs/spec). Stop it at any time; repeating the command resumes.
set -eu
folder=${1:-runs/spec}

drafter() {
    name=$1
    shift
    [ -f "$folder/$name/export/model.safetensors" ] ||
        python -m experiments.training configs/train/spec_drafter.yaml "out_dir=$folder/$name" "init_from=$folder/pruned" "$@"
}

[ -f "$folder/outputs/255.py" ] || python -m experiments.spec_models.starts "$folder"
drafter aligned "corpus_dir=$folder/outputs"
drafter unaligned
