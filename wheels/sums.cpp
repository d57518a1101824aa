// Runs the scan of a CPU library, forward and backward, for every rule and instruction set, and prints weighted sums of
// what it writes. For platforms without torch at hand: the sums of two platforms agree to about 5 digits, those of the
// product with int8 weights to all.
//
//   zig c++ -O1 -target aarch64-linux-gnu.2.17 -I kernels/include wheels/sums.cpp -o sums
//   qemu-aarch64-static -L ROOT sums libvilonghorn_cpu.so         (ROOT: a Debian arm64, for its libc)
//   zig c++ -O1 -target x86_64-windows-gnu -I kernels/include wheels/sums.cpp -o sums.exe
//   wine sums.exe libvilonghorn_cpu.dll
#include <stdio.h>
#include <string.h>

#include <vector>

#include "vilonghorn.h"
#ifdef _WIN32
#include <windows.h>
static void *open_library(const char *path) { return (void *)LoadLibraryA(path); }
static void *find(void *library, const char *name) { return (void *)GetProcAddress((HMODULE)library, name); }
#else
#include <dlfcn.h>
static void *open_library(const char *path) { return dlopen(path, RTLD_NOW); }
static void *find(void *library, const char *name) { return dlsym(library, name); }
#endif

typedef std::vector<float> Array;

static Array random_array(int64_t size, unsigned seed) {  // in [-0.5, 0.5), the same on every platform
  Array array(size);
  for (float &value : array) seed = seed * 1664525u + 1013904223u, value = (float)((seed >> 8) / 16777216.0 - 0.5);
  return array;
}

static double sum(const Array &array) {
  double total = 0;
  for (size_t i = 0; i < array.size(); i++) total += array[i] * ((double)(i % 7) - 3);
  return total;
}

int main(int count, char **arguments) {
  void *library = count == 2 ? open_library(arguments[1]) : nullptr;
  if (!library) return fprintf(stderr, "usage: sums LIBRARY, which must load\n"), 1;
#define VL_FIND(name) auto name##_ = (decltype(&name))find(library, #name)
  VL_FIND(vl_isas);
  VL_FIND(vl_isa_name);
  VL_FIND(vl_isa_runs);
  VL_FIND(vl_scan_forward);
  VL_FIND(vl_scan_backward);
  VL_FIND(vl_matmul);
  const int64_t G = 2, B = 4, L = 200, D = 70, N = 16, chunk = 64, lanes = 16;
  for (int isa = 0; isa < vl_isas_(); isa++) {
    const int64_t rows = 37, columns = 45, depth = 71;  // of a product with int8 weights
    Array a = random_array(rows * depth, 6), scale = random_array(columns, 7), product(rows * columns);
    std::vector<int8_t> weights;
    for (const float value : random_array(columns * depth, 8)) weights.push_back((int8_t)(254 * value));
    const VlGemm gemm = {rows, columns, depth, 1,       a.data(),       weights.data(), depth,
                         1,    1,       depth, nullptr, product.data(), scale.data(),   0};
    if (vl_isa_runs_(isa) && !vl_matmul_(&gemm, isa)) printf("%s int8: %.9g\n", vl_isa_name_(isa), sum(product));
    for (int rule = 0; rule < 3 && vl_isa_runs_(isa); rule++) {
      for (int threads : {1, 4}) {
        Array x = random_array(G * B * L * D, 1), dt = random_array(x.size(), 2), A = random_array(G * D * N, 3);
        Array k = random_array(G * B * L * N, 4), q = random_array(k.size(), 5), y(x.size()), dx(x.size()),
              ddt(x.size());
        Array dk(k.size()), dq(k.size()), dA(A.size()), saved(G * B * ((L + chunk - 1) / chunk) * N * (D + lanes));
        for (float &value : A) value -= 1.5f;
        const uint8_t reverse[] = {0, 1};
        VlScan scan;
        memset(&scan, 0, sizeof scan);
        scan.directions = G, scan.batch = B, scan.length = L, scan.channels = D, scan.states = N;
        scan.chunk = chunk, scan.channel_splits = 1, scan.rule = rule, scan.threads = threads, scan.reverse = reverse;
        scan.x = {x.data(), B * L * D, L * D, D}, scan.dt = {dt.data(), B * L * D, L * D, D}, scan.dy = scan.x;
        scan.k = {k.data(), B * L * N, L * N, N}, scan.q = {q.data(), B * L * N, L * N, N};
        scan.y = y.data(), scan.saved_states = saved.data(), scan.dx = dx.data(), scan.ddt = ddt.data();
        scan.dk = dk.data(), scan.dq = dq.data(), scan.dz_step = D;
        if (rule == VL_MAMBA) scan.A = A.data(), scan.dA = dA.data();
        if (vl_scan_forward_(&scan, isa) || vl_scan_backward_(&scan, isa))
          return fprintf(stderr, "the scan fails\n"), 1;
        printf("%s rule %d threads %d:", vl_isa_name_(isa), rule, threads);
        for (const Array *array : {&y, &dx, &ddt, &dk, &dq, &dA}) printf(" %.4f", sum(*array));
        printf("\n");
      }
    }
  }
}
