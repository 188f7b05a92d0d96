#!/usr/bin/env bash
# ik-llama-cpp-python 0.1.5: its wheel has no AVX-512, and its source distribution cannot be built.
#
# Guess: where the wheel of the faster fork of llama.cpp is too general, `pip install --no-binary` builds it for this processor.
# Seen: the wheel is compiled for AVX2 alone. The source distribution has everything but `common/cmake/`, so that the first target of the
# build ends with "Error processing file: .../common/cmake/build-info-gen-cpp.cmake". With `common/build-info.cpp` written by hand it builds.
# Harm: a processor with VNNI runs without it, and where there is no wheel nothing can be installed.
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder/venv"
PATH="$folder/venv/bin:$PATH"
cd "$folder"
release=ik-llama-cpp-python==0.1.5
pip install --quiet --disable-pip-version-check --no-compile "$release" 2> pip.log || { cat pip.log; exit 1; }
python - > system << 'PY'
import ctypes

from ik_llama_cpp._lib_loader import load_shared_library

library = load_shared_library()
library.llama_print_system_info.restype = ctypes.c_char_p
print(library.llama_print_system_info().decode())
PY
cat system

# Only the target that fails: with all targets pip says the same after it has compiled more.
pip wheel --verbose --disable-pip-version-check --no-deps --no-binary ik-llama-cpp-python "$release" \
    --config-settings=build.targets=build_info > build.log 2>&1 && status=0 || status=$?
echo "pip wheel --no-binary ik-llama-cpp-python: status $status"
grep -m 1 -o "Error processing file: .*" build.log
grep -q "AVX2 = 1 .*AVX512 = 0 .*AVX512_VNNI = 0" system
[[ $status != 0 ]]
