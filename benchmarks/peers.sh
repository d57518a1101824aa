#!/usr/bin/env bash
# Builds mamba_ssm's selective scan, which `gpu_day.py peers` times beside ours, into build/peers:
#   PYTHON=python3.12 ARCH=90 JOBS=4 benchmarks/peers.sh       in the root of a checkout, with a network and nvcc
# PYTHON needs the torch that will load it, of the CUDA release that nvcc has. No GPU is needed. Then
#   PYTHONPATH=build/peers python benchmarks/gpu_day.py peers
# times it, on a machine with the same Python and torch. It is built for bfloat16 and real A, as gpu_day.py calls
# it. The source is downloaded from PyPI; none of it is kept here.
set -euo pipefail
PYTHON=${PYTHON:-python3} ARCH=${ARCH:-90} JOBS=${JOBS:-1}
out=$PWD/build/peers work=$PWD/build/peers_source
die() { echo "peers.sh: $*" >&2; exit 1; }
[ -d kernels/cuda ] || die "run this in the root of a checkout"
command -v nvcc >/dev/null || die "nvcc is not installed: install the CUDA toolkit"
"$PYTHON" -c "import torch" || die "$PYTHON has no torch"
release=$(nvcc --version | sed -n 's/.*release \([0-9]*\).*/\1/p')
expected=$("$PYTHON" -c "import torch; print((torch.version.cuda or 'none').split('.')[0])")
[ "$release" = "$expected" ] || die "nvcc is of CUDA $release, torch of CUDA $expected: install the toolkit of $expected"

mkdir -p "$out" "$work"
ls "$work"/mamba_ssm-*.tar.gz >/dev/null 2>&1 ||
  "$PYTHON" -m pip download -q mamba_ssm --no-binary :all: --no-deps --no-build-isolation -d "$work" ||
  die "the source of mamba_ssm could not be downloaded: put mamba_ssm-*.tar.gz into $work"
[ -d "$out/einops" ] || "$PYTHON" -m pip install -q --no-deps --target "$out" einops ||
  die "einops could not be installed: put it into $out"
tar -xzf "$work"/mamba_ssm-*.tar.gz -C "$work"
source=$(echo "$work"/mamba_ssm-*/)

# The package without its __init__.py, which imports language models and what they need.
rm -rf "$out/mamba_ssm"
cp -r "$source/mamba_ssm" "$out/mamba_ssm"
: > "$out/mamba_ssm/__init__.py"

# selective_scan.cpp also refers to kernels for other dtypes. They take minutes each to compile; a call says so instead.
cd "$source/csrc/selective_scan"
cat > other_dtypes.cpp <<'CPP'
#include <ATen/cuda/CUDAContext.h>
#include <c10/util/complex.h>
#include <torch/extension.h>
#include "selective_scan.h"
using complex_t = c10::complex<float>;
constexpr char message[] = "this build of selective_scan_cuda is for bfloat16 and real A; see benchmarks/peers.sh";
template <typename T, typename W>
void selective_scan_fwd_cuda(SSMParamsBase &, cudaStream_t) { TORCH_CHECK(false, message); }
template <typename T, typename W>
void selective_scan_bwd_cuda(SSMParamsBwd &, cudaStream_t) { TORCH_CHECK(false, message); }
template void selective_scan_fwd_cuda<float, float>(SSMParamsBase &, cudaStream_t);
template void selective_scan_fwd_cuda<float, complex_t>(SSMParamsBase &, cudaStream_t);
template void selective_scan_fwd_cuda<at::Half, float>(SSMParamsBase &, cudaStream_t);
template void selective_scan_fwd_cuda<at::Half, complex_t>(SSMParamsBase &, cudaStream_t);
template void selective_scan_bwd_cuda<float, float>(SSMParamsBwd &, cudaStream_t);
template void selective_scan_bwd_cuda<float, complex_t>(SSMParamsBwd &, cudaStream_t);
template void selective_scan_bwd_cuda<at::Half, float>(SSMParamsBwd &, cudaStream_t);
template void selective_scan_bwd_cuda<at::Half, complex_t>(SSMParamsBwd &, cudaStream_t);
template void selective_scan_bwd_cuda<at::BFloat16, complex_t>(SSMParamsBwd &, cudaStream_t);
CPP
cuda=$(nvcc -v -x cu /dev/null --dryrun 2>&1 | sed -n 's/^#\$ TOP=//p' || true)
includes=$("$PYTHON" - <<'PY' 2>/dev/null
import glob, sysconfig
from torch.utils.cpp_extension import include_paths
paths = sysconfig.get_paths()
libraries = glob.glob(paths["purelib"] + "/nvidia/cu[0-9]*/include")  # cusparse and others that a toolkit may lack
print(*(f"-isystem {path}" for path in (*include_paths("cpu"), paths["include"], *libraries)))
PY
)
common="-std=c++20 -O3 -DTORCH_EXTENSION_NAME=selective_scan_cuda $includes -I."
flags="--expt-relaxed-constexpr --expt-extended-lambda --use_fast_math -gencode arch=compute_$ARCH,code=sm_$ARCH"
for type in HALF BFLOAT16 BFLOAT162; do
  flags+=" -U__CUDA_NO_${type}_OPERATORS__ -U__CUDA_NO_${type}_CONVERSIONS__"
done
printf '%s\n' selective_scan_fwd_bf16.cu selective_scan_bwd_bf16_real.cu selective_scan.cpp other_dtypes.cpp |
  xargs -P "$JOBS" -I{} sh -c "[ {}.o -nt {} ] || case {} in
    *.cu) nvcc -c -Xcompiler -fPIC $common $flags {} -o {}.part;;
    *) g++ -c -fPIC -isystem '$cuda/include' $common {} -o {}.part;;
  esac && { [ ! -e {}.part ] || mv {}.part {}.o; }" || die "a file of mamba_ssm does not compile; its message is above"
libraries=$("$PYTHON" -c "import os, torch; print(os.path.dirname(torch.__file__) + '/lib')" 2>/dev/null)
suffix=$("$PYTHON" -c "import sysconfig; print(sysconfig.get_config_var('EXT_SUFFIX'))")
nvcc -shared -cudart static ./*.o -L"$libraries" -ltorch -ltorch_cpu -ltorch_cuda -ltorch_python -lc10 -lc10_cuda \
  -o "$out/selective_scan_cuda$suffix" || die "the extension does not link"
cd "$out"
PYTHONPATH=$out "$PYTHON" -W ignore -c "from mamba_ssm.ops.selective_scan_interface import selective_scan_fn" ||
  die "the extension was built but does not import"
echo "Built $out/selective_scan_cuda$suffix for sm_$ARCH: carry build/peers, and add it to PYTHONPATH"
