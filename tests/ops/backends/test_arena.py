"""The working memory of the CPU kernels, under the compiler's undefined-behaviour sanitizer."""

import shutil
import subprocess
from pathlib import Path

import pytest

KERNELS = Path(__file__).parents[3] / "kernels" / "cpu"
COMPILER = shutil.which("clang++") or shutil.which("g++")  # the first sees more of what is undefined
PROGRAM = """
#include "arena.h"
#include <string.h>
#include <initializer_list>
int main() {
  Scratch scratch;
  for (int64_t count : {1, 100, 7}) {
    float *a;
    double *b;
    if (!scratch.allocate([&](Arena &c) { a = c.next<float>(count), b = c.next<double>(count) + 1; })) return 1;
    memset(a, 0, sizeof *a * count), memset(b, 0, sizeof *b * (count - 1));
    if ((uintptr_t)a % 64 || (uintptr_t)(b - 1) % 64 || (char *)(b - 1) < (char *)(a + count)) return 2;
    if ((char *)(b - 1 + count) > (char *)scratch.data + scratch.size) return 3;
  }
}
"""


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler (clang++ or g++)")
def test_arrays_are_aligned_and_do_not_overlap_and_behaviour_is_defined(tmp_path):
    def build(program: str) -> bool:
        (tmp_path / "arena.cpp").write_text(program)
        options = ["-std=c++17", "-O1", "-fsanitize=undefined", "-fno-sanitize-recover=all", f"-I{KERNELS}"]
        return subprocess.run([COMPILER, *options, "arena.cpp", "-o", "arena"], cwd=tmp_path).returncode == 0

    if not build("int main() {}"):
        pytest.skip(f"{COMPILER} has no library for its check of undefined behaviour")
    assert build(PROGRAM)
    result = subprocess.run([tmp_path / "arena"], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
