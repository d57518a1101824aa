// Measures the peak rate of multiply-adds of a core, for the roofline model of the benchmark.
#include "jobs.h"
#include "vectors.h"

namespace vilonghorn {
// Runs and counts 64 * `rounds` multiply-adds on 12 vectors, enough to hide their latency on two units.
int64_t VL_JOB(multiply_adds)(int64_t rounds) {
  typedef Vector<float> V;
  constexpr int kChains = 12;
  V sums[kChains];
  for (int c = 0; c < kChains; c++) sums[c] = splat(float(c));
  V factor = splat(0.5f), term = splat(1.f);
  for (int64_t i = 0; i < rounds; i++) {
    __asm__ volatile("" : "+m"(factor), "+m"(term));  // hides the values from the optimizer
    const V f = factor, t = term;
    for (int j = 0; j < 64; j++) { VL_UNROLL for (int c = 0; c < kChains; c++) sums[c] = sums[c] * f + t; }
  }
  V total = sums[0];
  for (int c = 1; c < kChains; c++) total += sums[c];
  __asm__ volatile("" : : "m"(total));
  return rounds * 64 * kChains * kLanes<float>;
}
}  // namespace vilonghorn
