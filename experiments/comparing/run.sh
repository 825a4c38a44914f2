#!/usr/bin/env bash
# Makes an environment for each peer in the folder given, measures all rows, and writes effects.jsonl.
# PIP_ARGS: arguments of pip, such as where it finds builds of torch for CPUs. llama.cpp is compiled, about ten minutes.
set -euo pipefail
work=$(realpath -m "${1:?give a folder for 8 GB of environments and models}")
cd "$(dirname "$0")"
mkdir -p "$work"
for name in llama_cpp transformers kvpress vllm; do
  python3.11 -m venv "$work/env-$name"
  CMAKE_ARGS="-DGGML_NATIVE=ON -DCMAKE_SUPPRESS_REGENERATION=ON -DLLAVA_BUILD=OFF" \
    "$work/env-$name/bin/pip" install -q ${PIP_ARGS:-} -r "$name.txt"
done
# kvpress with a transformers that is newer than it allows; vLLM without packages of another torch, which break it.
"$work/env-transformers/bin/pip" install -q ${PIP_ARGS:-} --no-deps kvpress==0.5.5 cachetools==5.5.2 fire==0.6.0 peft==0.21.2 termcolor==3.3.0
"$work/env-vllm/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
export HF_HUB_OFFLINE=1
{
  "$work/env-llama_cpp/bin/python" of_llama_cpp.py "$work" tokens
  "$work/env-transformers/bin/python" of_transformers.py "$work"
  "$work/env-kvpress/bin/python" of_transformers.py "$work"
  "$work/env-llama_cpp/bin/python" of_llama_cpp.py "$work"
  "$work/env-vllm/bin/python" of_vllm.py "$work"
} | grep '^{' > effects.jsonl
