// The tiles of a product of floats or int8, ROWS rows of COLUMNS vectors of out, which stay in registers over the
// depth; and what all products share.
#pragma once
#include "jobs.h"
#include "vectors.h"

namespace {
using namespace vilonghorn;

typedef Vector<float> V;
typedef Bits<float> I;
constexpr int W = kLanes<float>, COLUMNS = 3;  // vectors of a row of a tile
#if defined(__AVX512F__) || defined(__aarch64__)
constexpr int ROWS = 8;  // the tile fills 32 registers
#else
constexpr int ROWS = 4;  // 16 registers
#endif

VL_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
VL_INLINE int lanes(int64_t columns, int j) {  // in use, of the panel's j-th vector
  return (int)(columns <= j * W ? 0 : least(columns - j * W, W));
}
// The rows of a job end where those of the next job begin, at a multiple of ROWS.
VL_INLINE int64_t first_row(int64_t rows, int64_t job, int64_t jobs) {
  return least((rows + ROWS - 1) / ROWS * job / jobs * ROWS, rows);
}
VL_INLINE int64_t first_row(const Gemm &m, int64_t job) { return first_row(m.rows, job, gemm_jobs(m)); }

// Calls tile(Constant<R>(), first row) for all rows, in tiles of R of them.
template <int N> struct Constant {
  static constexpr int value = N;
};
template <class Tile> VL_INLINE void each_tile(int64_t rows, Tile tile) {
  for (int64_t r = 0; r < rows;) {
    const int64_t left = rows - r;
    if (left >= ROWS) tile(Constant<ROWS>(), r), r += ROWS;
    else if (left >= 4) tile(Constant<4>(), r), r += 4;
    else if (left >= 2) tile(Constant<2>(), r), r += 2;
    else tile(Constant<1>(), r), r += 1;
  }
}
// Calls pack(panel) for the panels that a job packs: those of kPanelColumns columns.
template <class Pack> VL_INLINE void each_panel(const Gemm &m, int64_t job, Pack pack) {
  constexpr int64_t wide = kPanelColumns / COLUMNS / W;
  for (int64_t panel = job * wide; panel < (job + 1) * wide; panel++)
    if (panel * COLUMNS * W < m.columns) pack(panel);
}

// The largest magnitude of the lanes that were added; NaN if one of them is.
struct Largest {
  I bits{};  // as integers, NaN is above all numbers
  VL_FLATTEN void add(V v) {
    const I size = bit_cast<I>(v) & 0x7fffffff;
    bits = size > bits ? size : bits;
  }
  VL_FLATTEN float value() const {
    return fold<float>(bit_cast<V>(bits), [](V a, V b) VL_LAMBDA {
      const I x = bit_cast<I>(a), y = bit_cast<I>(b);
      return bit_cast<V>(x > y ? x : y);
    })[0];
  }
};
// Rounds v to integers, to which it adds `zero`, and stores them as bytes.
constexpr float kRound = 12582912;   // 1.5 * 2^23: a sum with it has no fraction, and its last bits are the integer
constexpr int32_t kSymmetric = 128;  // the zero of bytes for -127 to 127
#ifdef VILONGHORN_X86
constexpr int32_t kLowest = 0;  // what is added to bytes
#else
constexpr int32_t kLowest = -128;
#endif
VL_INLINE void store_bytes(uint8_t *to, V v, int32_t zero, int count = W) {
  typedef int8_t Bytes __attribute__((vector_size(W)));
  const I rounded = bit_cast<I>(v + kRound) - (bit_cast<int32_t>(kRound) - zero - kLowest);
#ifdef __AVX512F__
  const Bytes bytes = __builtin_convertvector(rounded, Bytes);  // one instruction
#else
  typedef int16_t Shorts __attribute__((vector_size(2 * W)));
  const Bytes bytes = __builtin_convertvector(__builtin_convertvector(rounded, Shorts), Bytes);
#endif
  if (count == W) memcpy(to, &bytes, W);
  else memcpy(to, &bytes, count);
}
}  // namespace
