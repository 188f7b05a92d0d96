#!/usr/bin/env bash
# llama-cpp-py-sync 0.11739's wheel is tagged for glibc 2.17, and its libraries need glibc 2.38.
#
# Guess: pip installs a `manylinux2014` wheel only where its libraries load.
# Seen: `auditwheel` finds manylinux_2_38. Elsewhere pip installs the wheel, the package imports, and the first model ends with
# "version `GLIBC_2.38' not found".
# Harm: Debian 12, Ubuntu 22.04 and RHEL 9 have an older glibc, and there is no source distribution to build there.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
pip install --quiet --disable-pip-version-check --no-compile auditwheel==6.8.2 2> pip.log || { cat pip.log; exit 1; }
pip download --quiet --disable-pip-version-check --no-deps --platform manylinux2014_x86_64 --only-binary :all: \
    llama-cpp-py-sync==0.11739 2> pip.log || { cat pip.log; exit 1; }

wheel=$(echo llama_cpp_py_sync-*.whl)
echo "$wheel"
auditwheel show "$wheel" | tr '\n' ' ' > report
grep -o "GLIBC_2\.[0-9]*" report | sort --version-sort | tail -1
grep -o 'constrains the platform tag to "[^"]*"' report
pip install --quiet --disable-pip-version-check --no-compile "$wheel" 2> pip.log || { cat pip.log; exit 1; }
ldd --version | head -1
# Where glibc is newer, the library loads and the file is no model.
python -c "import sys, llama_cpp_py_sync; llama_cpp_py_sync.Llama(sys.argv[1])" "$wheel" 2>&1 | tail -1 | cut -c1-400 || true
[[ $wheel == *-manylinux2014_x86_64.whl ]]
grep -q 'platform tag to "manylinux_2_38_x86_64"' report
