#!/usr/bin/env bash
# llmexport 0.0.5, the exporter of MNN's models: its command cannot start.
#
# Guess: `pip install llmexport` brings a command `llmexport` that prints its help.
# Seen: "ModuleNotFoundError: No module named 'utils'". Its files import each other as if they lay on the path. Run as a script from
# inside the package, which puts its folder on the path, the same file prints its help.
# Harm: every example of its README begins with this command.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
pip install --quiet --disable-pip-version-check --no-compile llmexport==0.0.5 mnn==3.6.1 torch==2.13.0 transformers==5.23.0 onnx==1.23.2 \
    2> "$folder/pip.log" || { cat "$folder/pip.log"; exit 1; }

llmexport --help > "$folder/command" 2>&1 && status=0 || status=$?
echo "llmexport --help: status $status, $(tail -1 "$folder/command")"
script=$(python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/llmexport/llmexport.py
python "$script" --help > "$folder/script" 2>&1
echo "python $(basename "$script") --help: $(head -1 "$folder/script")"
grep -q "No module named 'utils'" "$folder/command"
grep -q "^usage: llmexport" "$folder/script"
