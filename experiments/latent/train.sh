#!/bin/sh
# sh experiments/latent/train.sh [FOLDER]: trains the models of configs/train/latent_siblings.yaml that are not finished, one
# after the other, in FOLDER (runs/latents). Stop it at any time; repeating the command resumes.
set -eu
folder=${1:-runs/latents}

sibling() {
    name=$1
    shift
    [ -f "$folder/$name/export/model.safetensors" ] || python -m experiments.training configs/train/latent_siblings.yaml "out_dir=$folder/$name" "$@"
}

latents() {
    sibling "$@" model.rope_theta=1000.0 model.latent.rank=80 model.latent.rotated=48 model.latent.plain=16 model.latent.value=64
}

sibling gqa
sibling mqa model.num_kv_heads=1
sibling mha model.num_kv_heads=4
latents mla
# The first weights alone.
latents mla_converted num_steps=1 learning_rate=1e-12 log_every=1 eval_every=1
# One of four layers keeps its attention, in the form of Qwen3.5; the others are gated delta rules.
longer="num_steps=200 learning_rate=1e-3"
sibling gqa_longer $longer
sibling hybrid_longer model.hybrid.interval=4 $longer
