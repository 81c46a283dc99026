#!/bin/sh
# Registers a vLLM server with hetlb for as long as it runs: the body of a Slurm job, or of any other.
#
#   sbatch --gpus 1 register.sh vllm serve Qwen/Qwen3-8B --served-model-name qwen3-8b --port 8000
#
# HETLB is the admin listener's URL, MODEL the model's name for clients, PORT the port of the server.
# HETLB_TOKEN is the admin token, LABELS a JSON object like {"gpu": "H100"}.
set -eu
: "${HETLB:?the URL of the admin listener}" "${MODEL:?the name of the model}"
PORT=${PORT:-8000}
NAME=${SLURM_JOB_ID:+job-$SLURM_JOB_ID-}$(hostname)-$PORT
URL=http://${ADDRESS:-$(hostname -f)}:$PORT

ask() { curl -sS -f -o /dev/null -H "Authorization: Bearer ${HETLB_TOKEN:-}" "$@"; }

register() {
    ask -X POST "$HETLB/v1/fleet/instances" -d "{\"name\": \"$NAME\", \"url\": \"$URL\", \"model\": \"$MODEL\",
        \"labels\": ${LABELS:-{\}}, \"ttl_s\": ${TTL:-60}}"
}

"$@" &
server=$!
trap 'ask -X DELETE "$HETLB/v1/fleet/instances/$NAME" || true; kill "$server" 2>/dev/null || true' EXIT
trap 'exit 143' INT TERM
while kill -0 "$server" 2>/dev/null; do
    # Nothing is registered before it answers: loading a model takes minutes.
    if curl -s -f -o /dev/null "$URL/health"; then register || true; fi
    sleep "${EVERY:-15}" &
    wait $! || true
done
wait "$server"
