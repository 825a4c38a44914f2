#!/usr/bin/env bash
# Makes an environment for each peer in the folder given, measures all rows there, and writes records.jsonl.
# PIP_ARGS: arguments of pip, such as where it finds builds of torch for CPUs. llama.cpp is compiled, about ten minutes.
set -euo pipefail
work=$(realpath -m "${1:?give a folder for 8 GB of environments and models}")
cd "$(dirname "$0")"
mkdir -p "$work"
for name in transformers kvpress llama_cpp vllm; do
  python3.11 -m venv "$work/$name"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_SUPPRESS_REGENERATION=ON -DLLAVA_BUILD=OFF" \
    "$work/$name/bin/pip" install -q ${PIP_ARGS:-} -r "$name.txt"
done
# kvpress with a transformers that is newer than it allows, and without the torch packages that break vLLM's import.
"$work/transformers/bin/pip" install -q ${PIP_ARGS:-} --no-deps kvpress==0.5.5 'cachetools<6' 'fire<0.7' peft==0.21.2
"$work/vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
export HF_HUB_OFFLINE=1
{
  "$work/llama_cpp/bin/python" of_llama_cpp.py "$work" tokens
  "$work/transformers/bin/python" of_transformers.py "$work" exact lm_eval_rolling quantized_cache sliding_cache
  "$work/transformers/bin/python" of_transformers.py "$work" kvpress_positions
  "$work/kvpress/bin/python" of_transformers.py "$work" kvpress_positions kvpress_chunks kvpress_windows kvpress_question
  "$work/llama_cpp/bin/python" of_llama_cpp.py "$work"
  "$work/vllm/bin/python" of_vllm.py "$work"
} | grep '^{' > records.jsonl
