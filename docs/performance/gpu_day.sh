#!/usr/bin/env bash
# Builds, checks, times and profiles the GPU kernels, on a machine with an NVIDIA GPU and without a network:
#   docs/performance/gpu_day.sh build-check      in the root of a checkout; each stage takes less than ten minutes
#   docs/performance/gpu_day.sh time
#   docs/performance/gpu_day.sh profile
# Environment: PYTHON (default python3), with torch, triton, timm and pytest; OUT, the folder of the figures (default
# docs/performance); ARCH, the compute capability to build for (default: that of the GPU, 90 without one). build/peers,
# which peers.sh makes, adds mamba_ssm's kernel. A step that fails says so, and the stage goes on with what it can. The
# exit status is 1 if a step failed, 3 without a GPU.
set -uo pipefail
PYTHON=${PYTHON:-python3} OUT=${OUT:-docs/performance} stage=${1:-}
export PYTHONPATH=$PWD:$PWD/build/peers${PYTHONPATH:+:$PYTHONPATH}
failed=0 begin=$SECONDS
say() { echo "[$((SECONDS - begin)) s] $*"; }
# step SECONDS NAME COMMAND...: a command with a time limit
step() {
  local limit=$1 name=$2 status
  shift 2
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
    step 300 "configure" $cmake -S kernels -B "build/gpu_$ARCH" "${options[@]}" &&
      step 400 "build" $cmake --build "build/gpu_$ARCH" --parallel "$jobs" &&
      step 30 "install" $cmake --install "build/gpu_$ARCH" --prefix . && return
  fi
  say "cmake is not here or failed: nvcc builds the CUDA library alone"
  mkdir -p vilonghorn/_lib
  step 400 "nvcc" nvcc -shared -cudart static -std=c++17 -O3 -Xcompiler=-fPIC,-fvisibility=hidden --threads 0 \
    -gencode "arch=compute_$ARCH,code=sm_$ARCH" kernels/cuda/*.cu -o vilonghorn/_lib/libvilonghorn_cuda.so
}

build_check() {
  build
  step 60 "backends" "$PYTHON" -c "from vilonghorn.ops import backends
for device in ('cuda', 'cpu'): print(device, backends(device))"
  need_gpu check
  parallel=$("$PYTHON" -c "import xdist; print('-n 8')" 2>/dev/null)
  step 420 "kernels, mixers and models against float64" "$PYTHON" -m pytest -q $parallel tests/ops/backends/test_gpu.py
  command -v compute-sanitizer >/dev/null && step 120 "memory check" compute-sanitizer --tool memcheck --error-exitcode 1 \
    "$PYTHON" -m pytest -q tests/ops/backends/test_gpu.py -k "slices_of_a_projection and cuda"
}

time_all() {
  need_gpu time
  "$PYTHON" -W ignore -c "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn" 2>/dev/null ||
    say "mamba_ssm's kernel is not here and is left out: docs/performance/peers.sh builds it into build/peers"
  step 120 "scan" "$PYTHON" docs/performance/scan.py --device cuda --rounds 3 --restarts 2 --json "$OUT/gpu-scan.json"
  step 80 "scan beside its peers" "$PYTHON" docs/performance/gpu_day.py peers --json "$OUT/gpu-peers.json"
  step 330 "models" "$PYTHON" -m vilonghorn bench --device cuda --compile --rounds 3 --quick \
    --size 224 512 1024 --json "$OUT/gpu-models.json" ||
    step 60 "models, not compiled, 224 px" "$PYTHON" -m vilonghorn bench --device cuda --rounds 2 --quick --size 224 \
      --json "$OUT/gpu-models-eager.json"
}

profile() {
  need_gpu profile
  step 200 "operators of a training step" "$PYTHON" docs/performance/gpu_day.py profile --json "$OUT/gpu-profile.json"
  metrics=smsp__issue_active.avg.pct_of_peak_sustained_active,launch__waves_per_multiprocessor,gpu__time_duration.sum
  metrics+=,smsp__average_warps_issue_stalled_long_scoreboard_per_issue_active.ratio,dram__bytes.sum,launch__registers_per_thread
  if command -v ncu >/dev/null; then
    step 240 "ncu" ncu --target-processes all --csv --page raw --metrics "$metrics" --kernel-name regex:scan_ --launch-count 12 --log-file \
      "$OUT/gpu-ncu.csv" "$PYTHON" docs/performance/scan.py --device cuda --rounds 1 ||
      say "ncu needs permission to read counters: ERR_NVGPUCTRPERM in $OUT/gpu-ncu.csv means that it has none"
  else
    say "ncu is not installed: $OUT/gpu-profile.json has the times of the kernels"
  fi
}

say "stage $stage, GPU: ${gpu:-none}, sm_$ARCH, $("$PYTHON" -c "import torch, triton
print('torch', torch.__version__, 'triton', triton.__version__)" 2>&1 | tail -1)"
case $stage in build-check) build_check ;; time) time_all ;; profile) profile ;; esac
say "stage $stage done$([ $failed = 0 ] || echo ", with failures above")"
exit $failed
