#!/bin/sh
# sh experiments/gqa_quality/train.sh [FOLDER]: trains the models of configs/train/gqa_siblings.yaml that are not finished,
# one after the other, in FOLDER (runs/heads). Stop it at any time; repeating the command resumes.
set -eu
folder=${1:-runs/heads}

sibling() {
    name=$1
    shift
    [ -f "$folder/$name/export/model.safetensors" ] || python -m experiments.training configs/train/gqa_siblings.yaml "out_dir=$folder/$name" "$@"
}

# 5 % of the steps, at a quarter of the learning rate, warmed up and decayed within them.
uptrained() {
    sibling "$@" "init_from=$folder/mha/export" num_steps=100 learning_rate=1e-3 warmup_steps=10 eval_every=50
}

sibling mha
sibling gqa model.num_kv_heads=2
sibling mqa model.num_kv_heads=1
uptrained gqa_uptrained model.num_kv_heads=2
uptrained mqa_uptrained model.num_kv_heads=1
# The means of heads alone.
sibling gqa_pooled model.num_kv_heads=2 "init_from=$folder/mha/export" num_steps=1 learning_rate=1e-12 log_every=1 eval_every=1
sibling mqa_pooled model.num_kv_heads=1 "init_from=$folder/mha/export" num_steps=1 learning_rate=1e-12 log_every=1 eval_every=1
# 5 % more steps for the first model, too: without them uptraining would compare more training with less.
uptrained mha_longer
