#!/usr/bin/env bash
# Remakes the profiles in this folder with `hetlb profile`. Usage: make_library.sh DIR, where DIR holds
# aic_vllm.csv (NVIDIA aiconfigurator-core 0.12.0 queried in November 2026; columns as in README.md).
set -euo pipefail
cd "$(dirname "$0")"
hetlb="${HETLB:-../.venv/bin/hetlb}"
by='NVIDIA aiconfigurator-core 0.12.0, tables of GEMM, attention and all-reduce measured on the GPU; host time is left out'

grid() { # SYSTEM MODEL TP BYTES_OF_KV_PER_TOKEN MEMORY KV_TOKENS(optional)
  local out; out="$(echo "$1-$2-tp$3" | tr '[:upper:]' '[:lower:]').yaml"
  "$hetlb" profile --from "csv:$data/aic_vllm.csv" --system "$1" --model "$2" --tp "$3" --out "$out" \
    --licence Apache-2.0 --attribution "$by" --kv-bytes-per-token "$4" --memory-bytes "$5" \
    ${6:+--kv-cache-tokens "$6"} > /dev/null
}

data="$(realpath "$1")"
grid a100_sxm Qwen3-14B 1 163840 85899345920 "$(awk -F, '$1=="a100_sxm" && $3=="Qwen3-14B" && $4==1 {print $8}' "$data/aic_kv_capacity.csv")"
for tp in 1 2 4 8; do
  grid l40s Llama-3.1-70B "$tp" 327680 48305799168 "$(awk -F, -v t="$tp" '$1=="l40s" && $3=="Llama-3.1-70B" && $4==t {print $8}' "$data/aic_kv_capacity.csv")"
  for system in a100_sxm h100_sxm l40s; do
    memory=85899345920; [ "$system" = l40s ] && memory=48305799168
    grid "$system" Llama-3.1-8B "$tp" 131072 "$memory" "$(awk -F, -v s="$system" -v t="$tp" '$1==s && $3=="Llama-3.1-8B" && $4==t {print $8}' "$data/aic_kv_capacity.csv")"
  done
  # The paper's machine: no measured tables are at hand, so peak figures of the V100 SXM2 data sheet
  # (125e12 FLOP/s fp16, 900e9 bytes/s) and two shares that are guesses, marked unmeasured in the file.
  "$hetlb" profile --from roofline --system V100-SXM2-32GB --model Llama-3-8B --tp "$tp" \
    --peak-flops 125e12 --bandwidth 900e9 --parameters 8.03e9 --kv-bytes-per-token 131072 \
    --memory-bytes 34359738368 --overhead-ms "$((1 + tp))" --out "v100-llama-3-8b-tp$tp-roofline.yaml" > /dev/null
done
