#!/usr/bin/env bash
# Remakes the profiles in this folder with `hetlb profile` (needs the extra `aic`). Usage: make_library.sh
set -euo pipefail
cd "$(dirname "$0")"
hetlb="${HETLB:-../.venv/bin/hetlb}"

# One pair of limits for all, which the plans' commands state: vLLM's own differ by GPU.
limits="engine: {max_num_batched_tokens: 8192, max_num_seqs: 256}"
work="$(mktemp -d)"
trap 'rm -rf "$work"' EXIT

composed() { # SYSTEM MODEL NAME TP
  "$hetlb" profile --from aiconfigurator --system "$1" --model "$2" --tp "$4" \
    --facts <(printf 'name: %s\n%s\n' "$1-$3-tp$4" "$limits") --out "$1-$3-tp$4.yaml" > /dev/null
}

# The extra does not know this model: its published configuration, in a folder of its name.
mkdir "$work/Qwen3-14B"
cat > "$work/Qwen3-14B/config.json" << 'CONFIG'
{"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 17408,
 "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
 "vocab_size": 151936, "max_position_embeddings": 40960, "tie_word_embeddings": false, "torch_dtype": "bfloat16"}
CONFIG
here="$PWD"
(cd "$work" && hetlb="$here/$hetlb" && "$hetlb" profile --from aiconfigurator --system a100_sxm --model Qwen3-14B \
  --tp 1 --facts <(printf 'name: a100_sxm-qwen3-14b-tp1\n%s\n' "$limits") --out "$here/a100_sxm-qwen3-14b-tp1.yaml" > /dev/null)
composed a100_sxm meta-llama/Meta-Llama-3.1-70B llama-3.1-70b 4
composed b200_sxm meta-llama/Meta-Llama-3.1-8B llama-3.1-8b 1
for tp in 1 2 4 8; do
  composed l40s meta-llama/Meta-Llama-3.1-70B llama-3.1-70b "$tp"
  for system in a100_sxm h100_sxm l40s; do
    composed "$system" meta-llama/Meta-Llama-3.1-8B llama-3.1-8b "$tp"
  done
  # The paper's machine: no measured tables are at hand, so peak figures of the V100 SXM2 data sheet
  # (125e12 FLOP/s fp16, 900e9 bytes/s) and two shares that are guesses, marked unmeasured in the file.
  cat > "$work/v100.yaml" << FACTS
hardware: {gpu: V100-SXM2-32GB, memory_bytes: 34359738368}
model: {name: Llama-3-8B, parameters: 8.03e9, kv_bytes_per_token: 131072}
roofline: {flops: 125e12, bandwidth_bytes_per_s: 900e9, overhead_ms: $((1 + tp))}
FACTS
  "$hetlb" profile --from roofline --facts "$work/v100.yaml" --tp "$tp" --out "v100-llama-3-8b-tp$tp-roofline.yaml" > /dev/null
done
