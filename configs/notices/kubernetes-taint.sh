#!/bin/sh
# Runs where kubectl may watch nodes: kubernetes-taint.sh KEY SECONDS. A node that gets the taint KEY (such as
# aws-node-termination-handler/spot-itn) is announced; its pods' names are the instances'.
set -eu
kubectl get nodes --watch -o 'jsonpath={.metadata.name}{" "}{.spec.taints[*].key}{"\n"}' | while read -r node taints; do
    case " $taints " in
    *" $1 "*)
        kubectl get pods -A --field-selector "spec.nodeName=$node" -o 'jsonpath={range .items[*]}{.metadata.name}{"\n"}{end}' |
            while read -r name; do "$(dirname "$0")/send.sh" "$name" "$2" || :; done
        ;;
    esac
done
