#!/usr/bin/env bash
# Checks, times and profiles the GPU kernels in 15 minutes on a machine with an NVIDIA GPU and without a network:
#   benchmarks/gpu_day.sh pack       before the day, where there are a network and nvcc: brings along what is missing there
#   benchmarks/gpu_day.sh check      there, in the root of the checkout: tests, then updates of a training run
#   benchmarks/gpu_day.sh time       there: captured steps, profiles and scans
# `pack` fills build/peers with Python packages and vilonghorn/_lib with the library for ARCH: carry both. peers.sh adds
# mamba_ssm's kernel. Environment: PYTHON (default python3), with torch, triton and pytest; OUT, the folder of the figures
# (default benchmarks/results/gpu, where no file is replaced); ARCH, the compute capability (default 90); LIMIT, seconds
# of a stage (default 345). Each stage first imports all that it needs, and ends if that fails. A later step that fails
# says so, and the stage goes on. The exit status is 1 if a step failed, 3 without a GPU.
set -uo pipefail
PYTHON=${PYTHON:-python3} OUT=${OUT:-benchmarks/results/gpu} ARCH=${ARCH:-90} LIMIT=${LIMIT:-345} stage=${1:-}
export PYTHONPATH=$PWD/build/peers:$PWD${PYTHONPATH:+:$PYTHONPATH} PYTHONUNBUFFERED=1
failed=0 begin=$SECONDS
say() { echo "[$((SECONDS - begin)) s] $*"; }
# new NAME: the path of a file in OUT that does not exist yet
new() {
  local path=$OUT/$1 n=1
  while [ -e "$path" ]; do n=$((n + 1)) path=$OUT/${1%.*}-$n.${1##*.}; done
  echo "$path"
}
# step SECONDS NAME COMMAND...: a command with a time limit, which also ends with the stage's
step() {
  local limit=$1 name=$2 status left=$((LIMIT - SECONDS + begin))
  shift 2
  [ $left -gt 0 ] || { say "FAILED: $name: no time is left"; failed=1; return 1; }
  [ "$limit" -le $left ] || limit=$left
  local command=$*
  say "$name: ${command%%$'\n'*}"
  timeout "$limit" "$@"
  status=$?
  [ $status = 0 ] && return 0
  failed=1
  [ $status = 124 ] && say "FAILED: $name: not done after $limit s" || say "FAILED: $name: exit status $status"
  return $status
}
case $stage in pack | check | time) ;; *) sed -n '2,12s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
[ -d kernels/cuda ] || { echo "gpu_day.sh: run this in the root of a checkout" >&2; exit 2; }

# nvcc builds the library of the CUDA kernels alone, without cmake.
build() {
  mkdir -p vilonghorn/_lib
  step 300 "nvcc" nvcc -shared -cudart static -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden --threads 0 \
    -gencode "arch=compute_$ARCH,code=sm_$ARCH" kernels/cuda/*.cu -o vilonghorn/_lib/libvilonghorn_cuda.so
}

# Only what the machine lacks: timm is too old there, jsonargparse is not installed.
pack() {
  step 120 "packages" "$PYTHON" -m pip install -q --no-deps --no-compile --upgrade --target build/peers \
    "timm>=1.0.31" "jsonargparse>=4.44" docstring-parser typeshed-client
  build
}

start() {
  mkdir -p "$OUT"
  step 60 "imports" "$PYTHON" -W ignore -c "
import sys, torch, triton, timm, pytest
sys.path[:0] = ['benchmarks', 'tests/helpers']
import gpu_day, scan, oracle, convolutions, vilonghorn.engine.trainer, vilonghorn.engine.command_line
from vilonghorn.cli import train
print('python', sys.version.split()[0], *(f'{m.__name__} {m.__version__}' for m in (torch, triton, timm)))" ||
    { say "a stage needs these imports: run gpu_day.sh pack, and carry build/peers"; exit 1; }
  "$PYTHON" -c "import torch; assert torch.cuda.is_available(); print(torch.cuda.get_device_name())" 2>/dev/null ||
    { say "no GPU: torch finds none, so there is nothing to $stage here"; exit 3; }
  step 30 "backends" "$PYTHON" -W ignore -c "
from vilonghorn.ops import backends
found = backends('cuda'); print(found); assert found['cuda'] == 'ready'" || build
}

# update NAME OPTIONS: updates of a training run on noise, with augmentation, optimizer and average
update() {
  step 70 "updates of $1, ${*:2}" "$PYTHON" -W ignore -m vilonghorn train --config imagenet/vilonghornv2_tiny --dry-run \
    --train-images 1281167 --model.num_classes 1000 --model.name "$1" --run.device cuda "${@:2}"
}

check() {
  start
  local parallel
  parallel=$("$PYTHON" -c "import xdist; print('-n 8')" 2>/dev/null)
  step 110 "models, mixers, chunks and captured steps" "$PYTHON" -m pytest -q $parallel -p no:cacheprovider \
    tests/ops/backends/test_gpu.py tests/engine/test_captured_update.py -k "model or mixer or chunks or captured"
  for name in vilonghornv2_tiny deit_tiny_patch16_224; do update $name --run.capture true; done
  update vilonghornv2_tiny
  update vilonghornv2_tiny --run.compile reduce-overhead
  step 90 "the other tests" "$PYTHON" -m pytest -q $parallel -p no:cacheprovider \
    tests/ops/backends/test_gpu.py -k "not (model or mixer or chunks or captured)"
}

# figures SECONDS WHAT SIZE BATCH [OPTIONS]: into WHAT-SIZE.json, which pages.py reads
figures() {
  step "$1" "$2, $3 px" "$PYTHON" -W ignore benchmarks/gpu_day.py "$2" --size "$3" --batch "$4" "${@:5}" \
    --json "$(new "$2-$3.json")"
}

time_all() {
  start
  local models=(--modes captured --models vilonghornv2_tiny deit_tiny_patch16_224 deit_tiny_patch16_224+channels_last)
  figures 70 models 224 128 "${models[@]}"
  figures 70 models 512 64 "${models[@]}"
  figures 70 models 1024 16 "${models[@]}"
  for cell in "224 128" "512 64" "1024 16"; do figures 40 profile $cell --models vilonghornv2_tiny; done
  step 40 "scan beside its peers" "$PYTHON" -W ignore benchmarks/gpu_day.py peers --json "$(new peers.json)"
  command -v ncu >/dev/null || { say "ncu is not installed: the profiles have the times of the kernels"; return; }
  local metrics=smsp__issue_active.avg.pct_of_peak_sustained_active,gpu__time_duration.sum,dram__bytes.sum
  step 60 "ncu" ncu --clock-control none --csv --page raw --metrics "$metrics" --kernel-name "regex:chunks_|conv_grid" \
    --launch-count 20 --log-file "$(new ncu.csv)" "$PYTHON" -W ignore benchmarks/gpu_day.py peers
}

say "stage $stage"
case $stage in pack) pack ;; check) check ;; time) time_all ;; esac
say "stage $stage done$([ $failed = 0 ] || echo ", with failures above")"
exit $failed
