#!/bin/sh
# Tells hetlb that an instance is gone in some seconds: send.sh NAME SECONDS (null takes it back).
# HETLB_ADMIN is its admin listener (default http://127.0.0.1:8081), HETLB_ADMIN_TOKEN the token, if it has one.
set -eu
exec curl -fsS -X PUT "${HETLB_ADMIN:-http://127.0.0.1:8081}/v1/fleet/instances/$1/notice" \
    -H "content-type: application/json" \
    ${HETLB_ADMIN_TOKEN:+-H "authorization: Bearer $HETLB_ADMIN_TOKEN"} -d "{\"deadline_s\": $2}"
