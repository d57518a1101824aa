#!/usr/bin/env bash
# Builds, checks, times and profiles the GPU kernels, on a machine with an NVIDIA GPU and without a network:
#   benchmarks/gpu_day.sh build-check      in the root of a checkout; each stage ends within LIMIT (560) s
#   benchmarks/gpu_day.sh time
#   benchmarks/gpu_day.sh profile
# Environment: PYTHON (default python3), with torch, triton, timm and pytest; OUT, the folder of the figures (default
# benchmarks/results/gpu, where no file is replaced); ARCH, the compute capability to build for (default: that of the GPU,
# 90 without one). build/peers, which peers.sh makes, adds mamba_ssm's kernel. A step that fails says so, and the stage
# goes on with what it can. The exit status is 1 if a step failed, 3 without a GPU.
set -uo pipefail
PYTHON=${PYTHON:-python3} OUT=${OUT:-benchmarks/results/gpu} stage=${1:-}
export PYTHONPATH=$PWD:$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}
failed=0 begin=$SECONDS LIMIT=${LIMIT:-560}
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
  [ $limit -le $left ] || limit=$left
  say "$name: $*"
  timeout "$limit" "$@"
  status=$?
  [ $status = 0 ] && return 0
  failed=1
  [ $status = 124 ] && say "FAILED: $name: not done after $limit s" || say "FAILED: $name: exit status $status"
  return $status
}
case $stage in build-check | time | profile) ;; *) sed -n '2,11s/^# \{0,1\}//p' "$0"; exit 2 ;; esac
[ -d kernels/cuda ] || { echo "gpu_day.sh: run this in the root of a checkout" >&2; exit 2; }
mkdir -p "$OUT"
gpu=$("$PYTHON" -c "
import torch
if torch.cuda.is_available():
    print(torch.cuda.get_device_name(), *torch.cuda.get_device_capability(), sep=', ')" 2>/dev/null)
ARCH=${ARCH:-$(sed 's/.*, \([0-9]*\), \([0-9]*\)$/\1\2/' <<<"${gpu:-x, 9, 0}")}
need_gpu() { [ -n "$gpu" ] || { say "no GPU: torch finds none, so there is nothing to $1 here"; exit 3; }; }

# Without cmake or ninja, calls the compilers; without nvcc, a library that was carried here stays, else Triton runs.
build() {
  local cmake=cmake options=(-DVILONGHORN_CUDA=ON "-DVILONGHORN_CUDA_ARCHITECTURES=$ARCH") jobs
  jobs=$(nproc)
  command -v cmake >/dev/null || cmake="$PYTHON -m cmake"
  command -v nvcc >/dev/null || { say "no nvcc: no CUDA kernels are built"; options=(-DVILONGHORN_CUDA=OFF); }
  if $cmake --version >/dev/null 2>&1; then
    command -v ninja >/dev/null && options+=(-G Ninja)
    step 40 "configure" $cmake -S kernels -B "build/gpu_$ARCH" "${options[@]}" &&
      step 200 "build" $cmake --build "build/gpu_$ARCH" --parallel "$jobs" &&
      step 30 "install" $cmake --install "build/gpu_$ARCH" --prefix . && return
  fi
  say "cmake is not here or failed: nvcc builds the CUDA library alone"
  mkdir -p vilonghorn/_lib
  step 150 "nvcc" nvcc -shared -cudart static -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden --threads 0 \
    -gencode "arch=compute_$ARCH,code=sm_$ARCH" kernels/cuda/*.cu -o vilonghorn/_lib/libvilonghorn_cuda.so
}

import_check() { step 60 "imports" "$PYTHON" -c "import sys; sys.path.append('benchmarks'); import gpu_day, scan"; }

build_check() {
  build
  step 60 "backends" "$PYTHON" -c "from vilonghorn.ops import backends
for device in ('cuda', 'cpu'): print(device, backends(device))"
  import_check
  need_gpu check
  parallel=$("$PYTHON" -c "import xdist; print('-n 8')" 2>/dev/null)
  step 300 "kernels, mixers and models against float64" "$PYTHON" -m pytest -q $parallel tests/ops/backends/test_gpu.py
  command -v compute-sanitizer >/dev/null || { say "no compute-sanitizer: memory and races are not checked"; return; }
  for tool in racecheck synccheck initcheck memcheck; do
    step 60 "$tool" compute-sanitizer --tool $tool --error-exitcode 1 "$PYTHON" -m pytest -q -p no:cacheprovider \
      tests/ops/backends/test_gpu.py -k "small_cases and cuda"
  done
}

# models NAME SECONDS SIZE BATCH [OPTIONS]: models beside DeiT, into models-NAME.json, which pages.py reads
models() {
  step "$2" "models-$1" "$PYTHON" benchmarks/gpu_day.py models --size "$3" --batch "$4" "${@:5}" \
    --json "$(new "models-$1.json")"
}

time_all() {
  import_check
  need_gpu time
  "$PYTHON" -W ignore -c "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn" 2>/dev/null ||
    say "mamba_ssm's kernel is not here and is left out: benchmarks/peers.sh builds it into build/peers"
  models 224 140 224 128
  models 512 100 512 64 --modes compiled captured
  models 1024 100 1024 64 --modes compiled captured
  models first 90 224 128 --modes compiled captured --models vilonghorn_tiny vim_tiny deit_tiny_patch16_224
  models small 90 224 128 --modes captured --models vilonghornv2_small deit_small_patch16_224
  step 90 "scan" "$PYTHON" benchmarks/scan.py --device cuda --rounds 3 --restarts 2 --json "$(new scan.json)"
  step 60 "scan beside its peers" "$PYTHON" benchmarks/gpu_day.py peers --json "$(new peers.json)"
  for mode in default reduce-overhead; do # of a training run, with augmentation, optimizer and average; needs jsonargparse
    step 120 "updates, compile $mode" "$PYTHON" -m vilonghorn train --config imagenet/vilonghornv2_tiny --dry-run \
      --train-images 1281167 --model.num_classes 1000 --run.compile $mode
  done
}

profile() {
  import_check
  need_gpu profile
  step 240 "kernels of a training step" "$PYTHON" benchmarks/gpu_day.py profile --json "$(new profile.json)"
  metrics=smsp__issue_active.avg.pct_of_peak_sustained_active,launch__waves_per_multiprocessor,gpu__time_duration.sum
  metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,dram__bytes.sum,launch__registers_per_thread
  command -v ncu >/dev/null || { say "ncu is not installed: the profile has the times of the kernels"; return; }
  step 240 "ncu" ncu --target-processes all --csv --page raw --metrics "$metrics" --kernel-name regex:scan_ --launch-count 12 \
    --log-file "$(new ncu.csv)" "$PYTHON" benchmarks/scan.py --device cuda --rounds 1 ||
    say "ncu needs permission to read counters: ERR_NVGPUCTRPERM in ncu.csv means that it has none"
}

say "stage $stage, GPU: ${gpu:-none}, sm_$ARCH, $("$PYTHON" -c "import torch, triton
print('torch', torch.__version__, 'triton', triton.__version__)" 2>&1 | tail -1)"
case $stage in build-check) build_check ;; time) time_all ;; profile) profile ;; esac
say "stage $stage done$([ $failed = 0 ] || echo ", with failures above")"
exit $failed
