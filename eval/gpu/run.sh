#!/usr/bin/env bash
# Runs `python -m eval gpu` from this folder, with whatever Python and torch this machine has.
# bash run [OPTIONS]; PYTHON=/path/to/python bash run. Results: ./gpu-results/gpu.json (or --out FOLDER).
# What is compiled stays in $TMPDIR/kvlab-pack-* for the next run (KVLAB_SCRATCH names another folder).
set -u
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
python="${PYTHON:-python3}"
name="kvlab-pack-$(id -u)-$(printf %s "$here" | cksum | cut -d ' ' -f 1)"
scratch="${KVLAB_SCRATCH:-${TMPDIR:-/tmp}/$name}"
mkdir -p "$scratch" && [ -O "$scratch" ] && chmod 700 "$scratch" || {
  echo "error: $scratch cannot be written; name another folder: KVLAB_SCRATCH=FOLDER bash run" >&2; exit 2; }
export PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false PYTHONDONTWRITEBYTECODE=1
"$python" "$here/unpack.py" "$here" "$scratch" || exit 2
export PYTHONPATH="$scratch/kvlab:$scratch/site${PYTHONPATH:+:$PYTHONPATH}" TRITON_CACHE_DIR="$scratch/triton"
export TORCHINDUCTOR_CACHE_DIR="${TORCHINDUCTOR_CACHE_DIR:-$scratch/inductor}"
export KVLAB_CACHE="$scratch/cache" NUMBA_CACHE_DIR="$scratch/numba" KVLAB_COMMIT="$(cat "$here/commit.txt")"
case " $* " in *" --out "*) ;; *) set -- "$@" --out "$PWD/gpu-results" ;; esac
"$python" -m eval gpu "$@"
