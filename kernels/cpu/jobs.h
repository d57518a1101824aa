// The jobs of the CPU library. A job processes a sequence and a split of its channels, or some rows. The job functions
// are compiled once per instruction set (VILONGHORN_ISA). Their sources include C headers only: the linker may keep an
// inline function of the C++ library that was compiled for AVX-512, and every processor would then run it.
#pragma once
#include "../include/vilonghorn.h"

namespace vilonghorn {
// The sum over the jobs' partial gradients of one parameter.
struct Sum {
  const void *addends;  // (count, size)
  void *sum;            // (size)
  int64_t count, size;
};
struct Sums {
  const Sum *each;
  int64_t sums;    // length of `each`
  int64_t splits;  // jobs that share the elements of each sum
  int32_t dtype, threads;
};

struct Gemm : VlGemm {
  float *packed;  // b in panels: depth x columns, with the columns rounded up to whole panels; int8 weights: see
                  // int8_panel_rows
  bool dots;      // whether the processor has AVX512_VNNI, or the dot products of aarch64
  int64_t segments = 1, a_segment = 0;  // equal parts of the depth, and elements of a from one to the next
  bool adds_bias = false;               // `add` is one row for all
  const float *norm_weight = nullptr;   // with b_scale, optional: rows of a are normed
  float eps = 0;                        // of the norm
};
// A product of the norm's rows: its y, or with b_scale its x, whose rows the product norms itself.
static inline Gemm of_norm(const VlNorm &n, Gemm m) {
  m.rows = n.batch, m.a = n.y;
  if (m.b_scale) m.a = n.x, m.norm_weight = (const float *)n.weight, m.eps = (float)n.eps;
  return m;
}
// Rows of bytes, each of which stands for scale * (byte - zero); kLowest of tile.h is added to all.
struct Bytes {
  const uint8_t *data;
  int64_t row, segment;  // bytes from a row, and from a segment of a row, to the next
  const float *scales;   // of row r at r * scale_step
  int64_t scale_step;
  int32_t zero;
};
constexpr int64_t kPanelColumns = 48, kPanelDepth = 512, kTileDepth = 32, kTileColumns = 32;
static inline int64_t panel_columns(const Gemm &m) { return m.bf16_parts ? kTileColumns : kPanelColumns; }
static inline int64_t num_panels(const Gemm &m) { return (m.columns + panel_columns(m) - 1) / panel_columns(m); }
// Rows of a panel of int8 weights: the sums of its columns, then one for four steps of the depth, or two if not `dots`.
static inline int64_t int8_panel_rows(const Gemm &m) { return 1 + (m.depth + 3) / 4 * (m.dots ? 1 : 2); }
static inline int64_t panel_floats(const Gemm &m) {
  const int64_t unit = m.bf16_parts ? kTileDepth : 1;
  const int64_t depth = m.b_scale ? int8_panel_rows(m) : (m.depth + unit - 1) / unit * unit;
  return depth * num_panels(m) * panel_columns(m);
}

// The scan and its projections in a block, whose sequences are `batch_step` elements apart in xz.
static inline VlMambaInner mamba_inner_of(const VlBlock &b, float *xz, int64_t batch_step, void *y) {
  VlMambaInner m = {};
  VlScan &s = m.scan;
  s.directions = b.directions, s.batch = b.batch, s.length = b.length, s.channels = b.channels, s.states = b.states;
  s.chunk = b.chunk, s.channel_splits = b.channel_splits, s.rule = b.rule, s.mean = 1, s.threads = b.threads;
  s.reverse = b.reverse;
  s.x = {xz, 0, batch_step, 2 * b.channels}, s.z = {xz + b.channels, 0, batch_step, 2 * b.channels};
  s.A = b.A, s.D = b.D, s.dt_bias = b.dt_bias, s.y = y, s.saved_states = b.save ? b.saved_states : nullptr;
  m.d_conv = b.d_conv, m.dt_rank = b.dt_rank, m.num_heads = b.num_heads, m.conv_grid = b.conv_grid;
  m.conv_weight = b.conv_weight, m.conv_bias = b.conv_bias, m.x_proj = b.x_proj, m.dt_proj = b.dt_proj;
  m.drop_scales = b.drop_scales, m.projected = b.projected;
  return m;
}

// A mixer that scans `count` tokens from `begin`. The convolution reads the others, too.
struct Mixer : VlMambaInner {
  int64_t begin, count;
  constexpr Mixer(const VlMambaInner &all) : VlMambaInner(all), begin(0), count(all.scan.length) {}
};
int mamba_inner_forward(Mixer, int isa);

// 0 if the kernels take these sizes, else an error, which vl_error explains. Of a scan in a mixer the rule may be none.
int check(const VlScan &, bool is_mixer = false);
int check(const VlMambaInner &);
int check(const VlBlock &);
int check(const VlConv &);

struct Linear : VlLinear {
  Gemm product;
};
struct Stem : VlStem {
  Gemm by_conv1, by_conv2;
  int64_t strips;  // jobs that share the rows of an image
};
constexpr int64_t kMaxLanes = 16;
static inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }
// Sides of the map of a convolution of a stem: 3x3, with zeros around the image.
static inline int64_t convolved(int64_t side, int64_t stride) { return (side - 1) / stride + 1; }

// A part of a block, the mixer or the MLP, as products of rows.
struct BlockPart : VlBlock {
  explicit BlockPart(const VlBlock &given) : VlBlock(given) {}
  Gemm by_in_proj, by_out_proj;
  int64_t strips;       // of gated_conv: jobs that share the rows of a sequence
  float *y;             // (B, L, D), or in backward of the MLP (B, L, hidden)
  float *normed, *dgv;  // backward of the MLP: (B, L, dim), (B, L, 2 hidden)
  float *dmid;          // backward of the MLP: (B, L, dim)
};
// A part with its two products. Their weights are packed if those of the block are.
BlockPart mixer_of(const VlBlock &, int isa);
BlockPart mlp_of(const VlBlock &, int isa);
int matmul(const Gemm &, int isa);                            // packs b, unless it is packed
int mixer_of_sequences(const VlBlock &, int isa);             // forward; a job processes whole sequences
int mixer_of_rows(const VlBlock &, int64_t strips, int isa);  // forward of a gated convolution on a grid
int mlp_forward(const VlBlock &, int isa);
int mlp_backward(const VlBlock &, float *dmid, int isa);

// Where channel_splits > 1, x_proj_forward runs before mamba_inner_forward, and x_proj_backward after
// mamba_inner_backward. By themselves, they are a convolution. gemm_pack runs before gemm.
#define VL_JOBS(X, isa)               \
  X(isa, scan_forward, VlScan)        \
  X(isa, scan_backward, VlScan)       \
  X(isa, x_proj_forward, Mixer)       \
  X(isa, mamba_inner_forward, Mixer)  \
  X(isa, mamba_inner_backward, Mixer) \
  X(isa, x_proj_backward, Mixer)      \
  X(isa, norm_forward, VlNorm)        \
  X(isa, norm_backward, VlNorm)       \
  X(isa, sum, Sums)                   \
  X(isa, gemm_pack, Gemm)             \
  X(isa, gemm, Gemm)                  \
  X(isa, mixer_forward, BlockPart)    \
  X(isa, gated_conv, BlockPart)       \
  X(isa, mlp_forward, BlockPart)      \
  X(isa, mlp_backward, BlockPart)     \
  X(isa, linear_forward, Linear)      \
  X(isa, stem_forward, Stem)

// The functions of one instruction set. Each returns false if memory ran out.
struct Jobs {
#define VL_FIELD(isa, name, Params) bool (*name)(const Params &, int64_t job);
  VL_JOBS(VL_FIELD, )
};

#if defined(VILONGHORN_X86) && defined(__linux__) && defined(__AVX512F__)
#define VL_AMX  // this instruction set may run products with bf16_parts
#endif
#define VL_DECLARE(isa, name, Params) bool name##_job_##isa(const Params &, int64_t);
#ifdef VILONGHORN_X86
VL_JOBS(VL_DECLARE, v2)
VL_JOBS(VL_DECLARE, v3)
VL_JOBS(VL_DECLARE, v4)
#else
VL_JOBS(VL_DECLARE, generic)
#endif
#define VL_PASTE_(name, isa) name##_##isa
#define VL_PASTE(name, isa) VL_PASTE_(name, isa)
#define VL_JOB(name) VL_PASTE(name, VILONGHORN_ISA)

#ifdef VILONGHORN_ISA                  // products and norms of a few rows, for a job that does more with them
bool VL_JOB(gemm_rows)(const Gemm &);  // all rows; b is packed already
// Of the norm's rows; with b_scale the y and the scale of the norm are not written.
bool VL_JOB(normed_gemm_rows)(const VlNorm &, const Gemm &);
void VL_JOB(gemm_int8_pack)(const Gemm &, int64_t job);
bool VL_JOB(gemm_int8_rows)(const Gemm &, int64_t begin, int64_t end);  // where b_scale is not null
void VL_JOB(gemm_bytes)(const Gemm &, const Bytes &a);                  // all rows of a; m.a is not read
void VL_JOB(gemm_bf16_pack)(const Gemm &, int64_t panel, int64_t first, int64_t depth);
bool VL_JOB(gemm_bf16_rows)(const Gemm &, int64_t begin, int64_t end);  // where bf16_parts is not 0
void VL_JOB(norm_rows)(const VlNorm &);
bool VL_JOB(norm_rows_backward)(const VlNorm &, int64_t job);
#endif

// Jobs that share the rows of a product, 32 to 128 rows each: fewer do not pay for packing, more exceed the cache. A
// multiple of the threads, for equal work.
static inline int64_t gemm_jobs(const Gemm &m) {
  const int64_t threads = m.threads, share = (m.rows + threads - 1) / threads;
  const int64_t most = share < 32 ? 32 : share < 128 ? share : 128;
  const int64_t jobs = (m.rows + most - 1) / most;
  return jobs > threads ? (jobs + threads - 1) / threads * threads : jobs;
}
// Jobs that share the rows of an MLP: what a job computes of its rows stays in its L2 cache.
static inline int64_t mlp_jobs(const VlBlock &m) {
  constexpr int64_t kCacheFloats = 3 << 16;  // 768 KiB of an L2 cache
  const int64_t fits = kCacheFloats / (3 * m.hidden + m.dim), most = fits < 32 ? 32 : fits < 128 ? fits : 128;
  const int64_t tokens = m.batch * m.length;
  const int64_t jobs = (tokens + most - 1) / most, smallest = (tokens + 31) / 32;  // smallest: of 32 rows each
  const int64_t even = (jobs + m.threads - 1) / m.threads * m.threads;
  return even < smallest ? even : smallest;
}
// Jobs that share the rows of a norm: at least 8192 elements each; at most four per thread, as each adds a partial
// gradient.
static inline int64_t norm_jobs(const VlNorm &a) {
  const int64_t worth = a.batch * a.channels / 8192, most = 4 * a.threads;
  return worth < 1 ? 1 : worth < most ? worth : most;
}
}  // namespace vilonghorn
