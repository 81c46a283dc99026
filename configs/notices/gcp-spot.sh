#!/bin/sh
# Runs on a spot VM of Google Cloud: gcp-spot.sh NAME. The metadata server answers once the VM is preempted;
# 30 s later it is gone.
set -eu
preempted="http://metadata.google.internal/computeMetadata/v1/instance/preempted?wait_for_change=true"
until [ "$(curl -fsS -H "metadata-flavor: Google" "$preempted")" = TRUE ]; do sleep 1; done
exec "$(dirname "$0")/send.sh" "$1" 25
