#!/bin/sh
# Starts an engine that leaves in peace: sigterm.sh NAME SECONDS vllm serve ... At SIGTERM hetlb hears that it
# is gone in SECONDS, and the engine, which would drop what it runs at once, hears of it only then.
set -eu
name=$1 seconds=$2
shift 2
"$@" &
engine=$!
trap '"$(dirname "$0")/send.sh" "$name" "$seconds" || :; sleep "$seconds"; kill "$engine"' TERM
wait "$engine" || wait "$engine"
