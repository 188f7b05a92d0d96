# Sourced by the findings: makes an environment of pinned engines in a temporary folder, which is removed at exit.
# `engines xgrammar llguidance` installs these two; `python` is then that environment's, and finds engines.py.
set -euo pipefail

declare -A pins=(
    [llguidance]="llguidance==1.9.1"
    [outlines]="outlines-core==0.2.14"
    [lmfe]="lm-format-enforcer==0.11.3 interegular==0.3.3 pydantic==2.14.4 numpy==2.4.6"
    # xgrammar imports torch and transformers; triton, which it also names, is not imported on a CPU.
    [xgrammar]="torch==2.13.0 transformers==5.23.0 apache-tvm-ffi==0.1.15.post2 pydantic==2.14.4"
    # speculators also names torchaudio and torchvision, which it does not import.
    [speculators]="torch==2.13.0 transformers==5.19.0 datasets==5.1.0 loguru==0.7.3 pydantic-settings==2.16.3 aiohttp==3.14.5 openai==3.57.0 protobuf==7.36.2 psutil==7.2.2 typer==0.29.2"
)

engines() {
    local here name packages="jsonschema==4.26.0"
    here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
    folder=$(mktemp -d)
    trap 'rm -rf "$folder"' EXIT
    python3 -m venv "$folder/venv"
    PATH="$folder/venv/bin:$PATH"
    for name in "$@"; do packages+=" ${pins[$name]}"; done
    # shellcheck disable=SC2086
    pip install --quiet --disable-pip-version-check --no-compile $packages 2>"$folder/pip.log" || { cat "$folder/pip.log"; return 1; }
    if [[ " $* " == *" xgrammar "* ]]; then
        pip install --quiet --disable-pip-version-check --no-compile --no-deps xgrammar==0.2.8 2>"$folder/pip.log" || { cat "$folder/pip.log"; return 1; }
    fi
    if [[ " $* " == *" speculators "* ]]; then
        pip install --quiet --disable-pip-version-check --no-compile --no-deps speculators==0.9.0 hs-connectors==0.9.0 2>"$folder/pip.log" || { cat "$folder/pip.log"; return 1; }
    fi
    export PYTHONPATH="$here" PYTHONDONTWRITEBYTECODE=1 TOKENIZERS_PARALLELISM=false
}
