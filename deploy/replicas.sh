#!/usr/bin/env bash
# Replicas of the server on this machine behind the gateway smg, without containers: `make replicas`.
#
#   deploy/replicas.sh LATEBRANCH SMG [flags of latebranch serve]
#
# REPLICAS (2) servers listen on BASE_PORT (8001) and the ports after it, the gateway on PORT (8000).
# Ctrl-C or SIGTERM ends the gateway, which lets its streams finish, then the replicas.
set -euo pipefail

latebranch=$1 smg=$2
shift 2
replicas=${REPLICAS:-2} port=${PORT:-8000} base_port=${BASE_PORT:-8001}
pids=() urls=()

stop() {
  trap '' INT TERM
  if [[ -n ${gateway:-} ]]; then kill "$gateway" 2> /dev/null || true; wait "$gateway" || true; fi
  kill "${pids[@]}" 2> /dev/null || true
  wait
}
trap stop EXIT
trap 'exit 0' INT TERM

for ((index = 0; index < replicas; index++)); do
  # A session of its own: Ctrl-C reaches a replica through stop, after the gateway.
  setsid "$latebranch" serve --port $((base_port + index)) "$@" &
  pids+=($!) urls+=("http://127.0.0.1:$((base_port + index))")
done
for index in "${!urls[@]}"; do
  until curl --silent --fail --output /dev/null "${urls[index]}/ready"; do
    kill -0 "${pids[index]}" || { echo "replica ${urls[index]} ended before it was ready" >&2; exit 1; }
    sleep 0.5
  done
done
setsid "$smg" launch --host 127.0.0.1 --port "$port" --prometheus-host 127.0.0.1 --policy cache_aware \
  --balance-abs-threshold 1 --balance-rel-threshold 1.1 \
  --health-check-endpoint /ready --health-check-interval-secs 5 --log-level warn --worker-urls "${urls[@]}" &
gateway=$!
echo "gateway: http://127.0.0.1:$port, replicas: ${urls[*]}"
wait -n "$gateway" "${pids[@]}" || true
echo "a process ended: stopping the others" >&2
