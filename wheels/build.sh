#!/bin/sh
# Builds the source archive and, from it, the wheels of all platforms into dist/, on one Linux machine. Needs Python and
# the network for the packages of the group `wheels` in pyproject.toml; with nvcc and a C++ compiler for it, the wheel for
# Linux on x86-64 also has the CUDA kernels. Called by `make wheels`; PYTHON names the interpreter.
set -eu
cd "$(dirname "$0")/.."
venv=build/wheels
[ -e $venv/bin/python ] || "${PYTHON:-python3}" -m venv $venv
$venv/bin/python -m pip install --quiet --upgrade pip
$venv/bin/python -m pip install --quiet --group wheels
PATH=$PWD/$venv/bin:$PATH
ZIG=$(python -c 'import pathlib, ziglang; print(pathlib.Path(ziglang.__file__).parent / "zig")')
CMAKE_TOOLCHAIN_FILE=$PWD/wheels/zig.cmake
export PATH ZIG CMAKE_TOOLCHAIN_FILE

# wheel TARGET PLATFORM TAG CUDA: the target in zig's terms, the platform in Python's, the tag of the wheel
wheel() {
    echo "wheels: building for $3, CUDA $4" >&2
    ZIG_TARGET=$1 _PYTHON_HOST_PLATFORM=$2 python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist \
        --config-settings=cmake.define.VILONGHORN_CUDA="$4" \
        --config-settings=cmake.define.VILONGHORN_CUDA_ARCHITECTURES="80;90" dist/vilonghorn-*.tar.gz
    python -m wheel tags --remove --platform-tag "$3" dist/vilonghorn-*-"$(echo "$2" | tr .- __)".whl
}

if command -v nvcc >/dev/null; then cuda=ON; else cuda=OFF; fi
rm -rf dist
python -m build --sdist --no-isolation
wheel x86_64-linux-gnu.2.17 linux-x86_64 manylinux_2_17_x86_64.manylinux2014_x86_64 $cuda
wheel aarch64-linux-gnu.2.17 linux-aarch64 manylinux_2_17_aarch64.manylinux2014_aarch64 OFF
wheel aarch64-macos.11.0 macosx-11.0-arm64 macosx_11_0_arm64 OFF
wheel x86_64-windows-gnu win-amd64 win_amd64 OFF
python wheels/check.py dist
