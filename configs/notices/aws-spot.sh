#!/bin/sh
# Runs on a spot instance of AWS: aws-spot.sh NAME. An interruption is announced 120 s ahead in the metadata
# of the instance (IMDSv2), which answers 404 until then.
set -eu
metadata=http://169.254.169.254/latest
while :; do
    token=$(curl -fsS -X PUT "$metadata/api/token" -H "x-aws-ec2-metadata-token-ttl-seconds: 60")
    if curl -fs -H "x-aws-ec2-metadata-token: $token" "$metadata/meta-data/spot/instance-action" >/dev/null; then
        exec "$(dirname "$0")/send.sh" "$1" 110
    fi
    sleep 5
done
