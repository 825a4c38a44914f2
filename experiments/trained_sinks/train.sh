#!/bin/sh
# sh experiments/trained_sinks/train.sh [FOLDER]: trains the models of configs/train/sink_siblings.yaml that are not
# finished, one after the other, in FOLDER (runs/siblings). Stop it at any time; repeating the command resumes.
set -eu
folder=${1:-runs/siblings}

sibling() {
    name=$1
    shift
    [ -f "$folder/$name/export/model.safetensors" ] || python -m experiments.training configs/train/sink_siblings.yaml "out_dir=$folder/$name" "$@"
}

sibling bos
sibling off_by_one bos=false model.sinks=zero
sibling learned bos=false model.sinks=learned
sibling plain bos=false
