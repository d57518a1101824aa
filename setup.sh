#!/bin/sh
# Makes .venv with this package (editable), its tests' needs and FFCV. Run again, it adds only what is missing.
# Called by make; PYTHON names the interpreter for a new .venv. Through apt, as root or with sudo, it installs the
# compiler and headers that are not there yet; elsewhere it says what to install.
set -eu
cd "$(dirname "$0")"
python=${PYTHON:-python3}
venv=$PWD/.venv/bin/python

say() { echo "setup: $*" >&2; }
fail() { say "$*"; exit 1; }

apt_install() {
    command -v apt-get >/dev/null || fail "there is no apt-get here: install what Debian calls $*, then run make again"
    if [ "$(id -u)" = 0 ]; then root=""; else root=sudo; fi
    command -v ${root:-env} >/dev/null || fail "neither root nor sudo: ask an administrator for apt-get install $*"
    say "installing $*"
    set -- $root env DEBIAN_FRONTEND=noninteractive apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 install "$@"
    "$@" >/dev/null 2>&1 || { $root apt-get -qq update && "$@" >/dev/null; } || fail "apt-get failed, see above: $*"
}

# 1. A virtual environment
if ! "$venv" -m pip --version >/dev/null 2>&1; then
    command -v "$python" >/dev/null || fail "no $python here: install Python 3.10 or later, or run make PYTHON=/path/to/python"
    version=$("$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        fail "$python is Python $version, but 3.10 or later is needed: run make PYTHON=/path/to/python"
    "$python" -c 'import ensurepip' 2>/dev/null || apt_install "python$version-venv"
    "$python" -m venv --clear .venv
    "$venv" -m pip install --quiet --upgrade pip
fi

# 2. A compiler for our kernels and FFCV; the headers of Python, OpenCV's image processing and TurboJPEG for FFCV
headers=$("$venv" -c 'import sysconfig; print(sysconfig.get_path("include"))')
export PKG_CONFIG_PATH="$PWD/.venv/lib/pkgconfig:${PKG_CONFIG_PATH:-}"
ffcv_compiles() {
    printf '#include <Python.h>\n#include <opencv2/imgproc.hpp>\n#include <turbojpeg.h>\n' |
        c++ -fsyntax-only -x c++ "-I$headers" $(pkg-config --cflags opencv4 libturbojpeg) -
}
if ! pkg-config --exists opencv4 2>/dev/null; then # comes only with all of OpenCV, of which FFCV needs two libraries
    mkdir -p .venv/lib/pkgconfig
    printf '%s\n' 'Name: opencv4' 'Description: OpenCV core and imgproc' 'Version: 4' \
        'Cflags: -I/usr/include/opencv4' 'Libs: -lopencv_imgproc -lopencv_core' >.venv/lib/pkgconfig/opencv4.pc
fi
if ! ffcv_compiles >/dev/null 2>&1; then
    version=$("$venv" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    [ -e "$headers/Python.h" ] || headers_package=python$version-dev
    apt_install g++ pkg-config libopencv-imgproc-dev libturbojpeg0-dev ${headers_package:-}
    problem=$(ffcv_compiles 2>&1) || fail "FFCV's headers are installed but do not compile: $problem"
fi

# 3. This package and what it depends on; the CUDA kernels for the GPUs of this machine
PATH=$PATH:/usr/local/cuda/bin
if [ -z "${VILONGHORN_CUDA:-}" ] && command -v nvcc >/dev/null && nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
    export VILONGHORN_CUDA=ON
    say "building the CUDA kernels for the GPU, some minutes; VILONGHORN_CUDA=OFF leaves them out, and Triton runs"
fi
say "installing the Python packages (the first time torch and its CUDA libraries, about 3 GB: some minutes)"
"$venv" -m pip install --editable '.[ffcv,test]'

# 4. FFCV, without the dependencies that it declares: they would bring a second OpenCV
if ! "$venv" -c 'import ffcv' 2>/dev/null; then
    say "building FFCV"
    echo 'ffcv==1.0.2 --hash=sha256:42766a487c8a659b543d070f24732c4b65aab8d96980f5792c63e91e55511f00' >.venv/ffcv.txt
    CPPFLAGS="-DOPENCV_ALL_HPP -include opencv2/imgproc.hpp" \
        "$venv" -m pip install --quiet --no-deps --no-warn-conflicts --force-reinstall --no-binary ffcv --requirement .venv/ffcv.txt
    "$venv" -c 'import ffcv' || fail "FFCV was built but cannot be imported, see above"
fi
