#!/bin/sh
# Writes .env for the compose files: a key to use the API, one to administer it, one for Prometheus, Grafana's password.
set -eu
cd "$(dirname "$0")/.."
if [ -e .env ]; then
    echo ".env is there already" >&2
    exit 1
fi
umask 077
key() { od -An -N24 -tx1 /dev/urandom | tr -d ' \n'; }
use=$(key) admin=$(key)
cat > .env <<END
LATEBRANCH_API_KEYS=user:use:$use,admin:admin:$admin
LATEBRANCH_ADMIN_KEY=$admin
LATEBRANCH_SCRAPE_KEY=$(key)
GRAFANA_ADMIN_PASSWORD=$(key)
END
echo "wrote .env; the key to use the API is $use"
