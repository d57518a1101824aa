// The exported functions of the CPU library: select the instruction set and run the jobs on threads.
#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <unistd.h>
#endif
#ifdef VILONGHORN_X86
#include <cpuid.h>
#ifdef __linux__
#include <sys/syscall.h>
#endif
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif
#include "arena.h"
#include "conv_grid.h"
#include "threads.h"

namespace vilonghorn {
thread_local CallerThreads *caller_threads = nullptr;
namespace {

#define VL_ENTRY(isa, name, Params) name##_job_##isa,
#ifdef VILONGHORN_X86
constexpr Jobs kV4 = {VL_JOBS(VL_ENTRY, v4)};
const Jobs kJobs[] = {{VL_JOBS(VL_ENTRY, v2)}, {VL_JOBS(VL_ENTRY, v3)}, kV4, kV4, kV4};
const char *const kNames[] = {"v2", "v3", "v4", "vnni", "amx"};
constexpr int kDots = 3, kAmx = 4;
// The last instruction set that processor and system support, or -1. zig's __builtin_cpu_supports always says no.
int best_isa() {
  unsigned a, b, c, d, features, e, saved;
  const unsigned v3 = bit_AVX2 | bit_BMI2;
  const unsigned v4 = v3 | bit_AVX512F | bit_AVX512BW | bit_AVX512CD | bit_AVX512DQ | bit_AVX512VL;
  __cpuid(1, a, b, c, d);
  if (!(c & bit_FMA) || !(c & bit_OSXSAVE) || !__get_cpuid_count(7, 0, &a, &b, &e, &features))
    return c & bit_SSE4_2 ? 0 : -1;
  asm("xgetbv" : "=a"(saved), "=d"(d) : "c"(0));
  if ((saved & 0x6) != 0x6 || (b & v3) != v3) return 0;
  if ((saved & 0xe6) != 0xe6 || (b & v4) != v4) return 1;
  if (!(e & bit_AVX512VNNI)) return 2;
#ifdef __linux__
  constexpr unsigned tiles = 0x60000, amx = 1 << 22 | 1 << 24;  // AMX_BF16 and AMX_TILE
  constexpr int request = 0x1023, tile_data = 18;               // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  if ((saved & tiles) == tiles && (features & amx) == amx && __get_cpuid_count(7, 1, &a, &b, &c, &d) &&
      a & bit_AVX512BF16 &&
      !syscall(SYS_arch_prctl, request, tile_data))  // Linux gives a process the tiles when it asks for them
    return kAmx;
#endif
  return kDots;
}
bool runs(int isa) {
  static const int best = best_isa();  // cpuid is slow in virtual machines
  return isa <= best;
}
#else
constexpr Jobs kGeneric = {VL_JOBS(VL_ENTRY, generic)};
const Jobs kJobs[] = {kGeneric, kGeneric};
const char *const kNames[] = {"generic", "dotprod"};
constexpr int kDots = 1, kAmx = 2;  // kAmx: not in kJobs
bool runs(int isa) {
#if defined(__aarch64__) && defined(__linux__)
  static const bool dots = getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#elif defined(__aarch64__) && defined(__APPLE__)
  constexpr bool dots = true;
#else
  constexpr bool dots = false;
#endif
  return isa < kDots + dots;
}
#endif
constexpr int kNumIsas = sizeof kJobs / sizeof *kJobs;

// Numbered jobs, processed by several threads. A thread begins with its own portion of consecutive jobs: in calls with
// as many jobs and threads it has the same rows, which stay in its caches. Then it takes jobs of the other portions.
struct Work {
  struct alignas(64) Portion {  // of one thread, in a cache line of its own
    std::atomic<int64_t> next;
    int64_t end;
  };
  const std::function<bool(int64_t)> run;
  std::vector<Portion> portions;  // not used by caller_threads
  std::atomic<bool> ok{true};

  Work(std::function<bool(int64_t)> run, int64_t jobs, int threads) : run(std::move(run)), portions(threads) {
    for (int i = 0; i < threads; i++) portions[i].next = jobs * i / threads, portions[i].end = jobs * (i + 1) / threads;
  }
  static void run_job(void *self, size_t job) {
    Work &w = *(Work *)self;
    if (!w.run(job)) w.ok = false;
  }
  void run_jobs(size_t thread) {
    for (size_t i = 0; i < portions.size(); i++) {
      Portion &p = portions[(thread + i) % portions.size()];
      for (int64_t job; (job = p.next.fetch_add(1)) < p.end;) run_job(this, job);
    }
  }
};

// Our own threads, for processes without GNU OpenMP.
class Pool {
 public:
  void run(Work &work, int threads) {
    std::unique_lock<std::mutex> caller(caller_, std::try_to_lock);
    if (!caller) return work.run_jobs(0);  // a second caller does not wait, but runs its jobs alone
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work, wanted_ = threads - 1, busy_ = 0;
    }
    wake_.notify_all();
    work.run_jobs(0);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // threads that have not woken up yet are not needed
    done_.wait(lock, [&] { return busy_ == 0; });
    work_ = nullptr;
  }

 private:
  void grow(int threads) {
    while (started_ < threads) std::thread([this, thread = ++started_] { serve(thread); }).detach();
  }
  void serve(int thread) {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return wanted_ > 0; });
      wanted_--, busy_++;
      Work *work = work_;
      lock.unlock();
      work->run_jobs(thread);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::mutex caller_, mutex_;
  std::condition_variable wake_, done_;
  Work *work_ = nullptr;
  int wanted_ = 0, busy_ = 0, started_ = 0;
};

// The pool is never destroyed. A forked child gets a new one, since threads do not survive a fork.
Pool &pool() {
  static std::mutex mutex;
  static Pool *current = nullptr;
  std::lock_guard<std::mutex> lock(mutex);
#if defined(__unix__) || defined(__APPLE__)
  static pid_t owner = 0;
  if (owner != getpid()) owner = getpid(), current = nullptr;
#endif
  if (!current) current = new Pool;
  return *current;
}

// torch's OpenMP threads keep spinning after each operator; a second pool would compete with them for the cores. GNU
// OpenMP, which torch loads on Linux, runs jobs here, unless VILONGHORN_THREADING=std selects our own threads.
struct Gomp {
  void (*parallel)(void (*)(void *), void *, unsigned threads, unsigned flags) = nullptr;
  int (*thread_number)() = nullptr;
};
const Gomp &gomp() {
  static const Gomp found = [] {
    Gomp g;
#if defined(__unix__) || defined(__APPLE__)
    const char *threading = getenv("VILONGHORN_THREADING");
    if (threading && !strcmp(threading, "std")) return g;
    g.thread_number = (decltype(g.thread_number))dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    if (g.thread_number) g.parallel = (decltype(g.parallel))dlsym(RTLD_DEFAULT, "GOMP_parallel");
#endif
    return g;
  }();
  return found;
}

int64_t num_jobs(const VlNorm &a) { return norm_jobs(a); }
int64_t num_jobs(const Sums &a) { return a.splits; }
int64_t num_jobs(const Gemm &m) { return gemm_jobs(m); }
template <class Shape> int64_t num_jobs(const Shape &a) { return a.batch * a.channel_splits; }

int chosen(int isa) {  // isa, or the best one
  for (int i = 0; i < kNumIsas && isa < 0; i++)
    if (runs(kNumIsas - 1 - i)) isa = kNumIsas - 1 - i;
  return isa;
}
int parts_for(int isa, int bf16_parts) { return chosen(isa) == kAmx ? bf16_parts : 0; }

template <class Args>
int run(const Args &a, int64_t jobs, int wanted, int isa, bool (*Jobs::*which)(const Args &, int64_t)) {
  isa = chosen(isa);
  if (isa < 0 || isa >= kNumIsas || !runs(isa)) return 1;
  const int threads = (int)std::max<int64_t>(1, std::min<int64_t>(wanted, jobs));
  Work work([&](int64_t job) { return (kJobs[isa].*which)(a, job); }, jobs, threads);
  if (caller_threads && jobs > 1) caller_threads->parallel_for(Work::run_job, jobs, &work);
  else if (threads == 1) work.run_jobs(0);
  else if (gomp().parallel)
    gomp().parallel([](void *w) { ((Work *)w)->run_jobs(gomp().thread_number()); }, &work, threads, 0);
  else pool().run(work, threads);
  return work.ok ? 0 : 1;
}
template <class Args, class Shape>
int run(const Args &a, const Shape &shape, int isa, bool (*Jobs::*which)(const Args &, int64_t)) {
  return run(a, num_jobs(shape), shape.threads, isa, which);
}

thread_local Scratch addend_buffer, panel_buffer, value_buffer, neighbor_buffer;  // of the calling thread

// The gradient of one parameter: its field (null if not wanted), its number of elements, and that of partial gradients.
struct Gradient {
  void *&field;
  int64_t size, count;
};

// Runs `work` with the gradient fields redirected to a buffer, where jobs write partial gradients. Then sums these into
// the caller's tensors.
typedef std::initializer_list<Gradient> Gradients;
template <class Run> int sum_gradients(int dtype, int threads, int isa, Gradients gradients, Run work) {
  constexpr int64_t kGrain = 16384;  // minimum number of elements per thread
  const int64_t bytes = dtype == VL_FLOAT64 ? 8 : 4;
  int64_t total = 0, wanted = 0;
  for (const Gradient &g : gradients) total += g.field ? g.count * g.size : 0;
  char *at = (char *)addend_buffer.reserve(bytes * total);
  if (total > 0 && !at) return 1;
  Sum each[8];
  for (const Gradient &g : gradients)
    if (g.field) each[wanted++] = {at, g.field, g.count, g.size}, g.field = at, at += bytes * g.count * g.size;
  if (work()) return 1;
  const int64_t splits = total < kGrain ? 1 : total / kGrain < threads ? total / kGrain : threads;
  const Sums sums = {each, wanted, splits, dtype, threads};
  return run(sums, sums, isa, &Jobs::sum);
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int vl_abi(void) { return VL_ABI; }
VL_EXPORT int vl_isas(void) { return kNumIsas; }
VL_EXPORT const char *vl_isa_name(int isa) { return isa >= 0 && isa < kNumIsas ? kNames[isa] : ""; }
VL_EXPORT int vl_isa_runs(int isa) { return isa >= 0 && isa < kNumIsas && runs(isa); }
VL_EXPORT const char *vl_threading(void) { return gomp().parallel ? "gomp" : "std"; }
VL_EXPORT int vl_scan_forward(const VlScan *a, int isa) {
  const int error = check(*a);
  return error ? error : run(*a, *a, isa, &Jobs::scan_forward);
}
VL_EXPORT int vl_scan_backward(const VlScan *given, int isa) {
  VlScan a = *given;
  if (const int error = check(a)) return error;
  const int64_t channels = a.directions * a.channels, B = a.batch;
  return sum_gradients(
      a.dtype, a.threads, isa,
      {{a.dA, channels * a.states, B}, {a.dD, channels, B}, {a.ddt_bias, channels, B * a.channel_splits}},
      [&] { return run(a, a, isa, &Jobs::scan_backward); });
}
VL_EXPORT int vl_norm_forward(const VlNorm *a, int isa) { return run(*a, *a, isa, &Jobs::norm_forward); }
VL_EXPORT int vl_norm_backward(const VlNorm *given, int isa) {
  VlNorm a = *given;
  return sum_gradients(a.dtype, a.threads, isa, {{a.dweight, a.channels, norm_jobs(a)}},
                       [&] { return run(a, a, isa, &Jobs::norm_backward); });
}
// Sets the neighbors of a grid, if there is one. False if memory ran out.
static bool set_neighbors(VlConvGrid &grid, int64_t length, int64_t d_conv) {
  if (!grid.rows) return true;
  int32_t *neighbors = (int32_t *)neighbor_buffer.reserve(sizeof(int32_t) * length * d_conv);
  if (!neighbors) return false;
  fill_neighbors(grid, length, d_conv, neighbors);
  grid.neighbors = neighbors;
  return true;
}
// With one channel split, a job has all channels and computes its x_proj itself.
static bool has_x_proj_jobs(const VlScan &s) { return s.channel_splits > 1 && s.rule != VL_NONE; }
int vilonghorn::mamba_inner_forward(Mixer a, int isa) {
  if (const int error = check(a)) return error;
  if (!set_neighbors(a.conv_grid, a.scan.length, a.d_conv)) return 1;
  return (has_x_proj_jobs(a.scan) && run(a, a.scan, isa, &Jobs::x_proj_forward)) ||
         run(a, a.scan, isa, &Jobs::mamba_inner_forward);
}
VL_EXPORT int vl_mamba_inner_forward(const VlMambaInner *m, int isa) { return mamba_inner_forward(*m, isa); }
VL_EXPORT int vl_mamba_inner_backward(const VlMambaInner *given, int isa) {
  Mixer a = *given;
  VlScan &s = a.scan;
  if (const int error = check(a)) return error;
  if (!set_neighbors(a.conv_grid, s.length, a.d_conv)) return 1;
  const int64_t channels = s.directions * s.channels, heads = s.directions * a.num_heads, B = s.batch;
  const int64_t projected = a.dt_rank + 2 * s.states, jobs = B * s.channel_splits;
  return sum_gradients(s.dtype, s.threads, isa,
                       {{a.dconv_weight, channels * a.d_conv, B},
                        {a.dconv_bias, channels, B},
                        {a.dx_proj, channels * projected, B},
                        {a.ddt_proj, heads * a.dt_rank, jobs},
                        {s.ddt_bias, heads, jobs},
                        {s.dA, channels * s.states, B},
                        {s.dD, channels, B}},
                       [&] {
                         return run(a, s, isa, &Jobs::mamba_inner_backward) ||
                                (has_x_proj_jobs(s) && run(a, s, isa, &Jobs::x_proj_backward));
                       });
}
// A convolution as a mixer without x_proj and scan.
static VlMambaInner mamba_inner_of(const VlConv &a) {
  VlMambaInner m = {};
  VlScan &s = m.scan;
  s.directions = a.directions, s.batch = a.batch, s.length = a.length, s.channels = a.channels;
  s.chunk = 32, s.channel_splits = a.channel_splits, s.dtype = a.dtype, s.threads = a.threads, s.reverse = a.reverse;
  s.x = a.x, s.y = a.y, s.dy = a.dy, s.dz_step = a.dx_step;
  m.d_conv = a.d_conv, m.conv_weight = a.weight, m.conv_bias = a.bias;
  m.dx = a.dx, m.dconv_weight = a.dweight, m.dconv_bias = a.dbias;
  return m;
}
VL_EXPORT int vl_conv_forward(const VlConv *a, int isa) {
  if (const int error = check(*a)) return error;
  const Mixer m = mamba_inner_of(*a);
  return run(m, m.scan, isa, &Jobs::x_proj_forward);
}
VL_EXPORT int vl_conv_backward(const VlConv *a, int isa) {
  if (const int error = check(*a)) return error;
  Mixer m = mamba_inner_of(*a);
  const int64_t channels = a->directions * a->channels;
  return sum_gradients(a->dtype, a->threads, isa,
                       {{m.dconv_weight, channels * a->d_conv, a->batch}, {m.dconv_bias, channels, a->batch}},
                       [&] { return run(m, m.scan, isa, &Jobs::x_proj_backward); });
}
static int pack(const Gemm &m, int isa) {
  const int64_t slabs = m.b_scale ? 1 : (m.depth + kPanelDepth - 1) / kPanelDepth;
  return run(m, slabs * num_panels(m), m.threads, isa, &Jobs::gemm_pack);
}
// Sets what the instruction set decides.
static Gemm for_isa(Gemm m, int isa) {
  m.dots = chosen(isa) >= kDots, m.bf16_parts = m.b_scale ? 0 : parts_for(isa, m.bf16_parts);
  return m;
}
int vilonghorn::matmul(const Gemm &given, int isa) {
  Gemm m = for_isa(given, isa);
  if (!m.packed) {
    m.packed = (float *)panel_buffer.reserve(sizeof(float) * panel_floats(m));
    if (!m.packed || pack(m, isa)) return 1;
  }
  return run(m, m, isa, &Jobs::gemm);
}
VL_EXPORT int vl_matmul(const VlGemm *m, int isa) { return matmul({*m, nullptr, false}, isa); }

// rows times weight^T plus bias; the weight is (columns, depth).
static Gemm of_layer(int64_t columns, int64_t depth, const void *weight, const void *bias, const void *scale,
                     int threads, int isa) {
  const VlGemm product = {0, columns, depth, threads, nullptr, weight, depth, 1, 1, depth, bias, nullptr, scale, 0};
  Gemm m = for_isa({product, nullptr, false}, isa);
  m.adds_bias = true;
  return m;
}
// `packed` of a layer, or its weights packed for this call; null if memory ran out.
template <class Layer>
static const void *packed_of(const Layer *layer, int isa, int64_t (*size)(const Layer *, int),
                             int (*pack)(const Layer *, void *, int)) {
  if (layer->packed) return layer->packed;
  void *to = panel_buffer.reserve(size(layer, isa));
  return to && !pack(layer, to, isa) ? to : nullptr;
}
static Linear linear_of(const VlLinear &given, const void *packed, int isa) {
  Linear l{given, {}};
  const int64_t depth = l.merge * l.merge * l.channels;
  l.product = of_layer(l.out_channels, depth, l.weight, l.bias, l.scale, l.threads, isa);
  l.product.rows = l.batch * l.rows * l.columns, l.product.packed = (float *)packed;
  return l;
}
VL_EXPORT int64_t vl_linear_packed_bytes(const VlLinear *l, int isa) {
  return sizeof(float) * panel_floats(linear_of(*l, nullptr, isa).product);
}
VL_EXPORT int vl_linear_pack(const VlLinear *l, void *packed, int isa) {
  return pack(linear_of(*l, packed, isa).product, isa);
}
VL_EXPORT int vl_linear_forward(const VlLinear *given, int isa) {
  const Linear l = linear_of(*given, packed_of(given, isa, vl_linear_packed_bytes, vl_linear_pack), isa);
  return l.product.packed ? run(l, l.product, isa, &Jobs::linear_forward) : 1;
}

static Stem stem_of(const VlStem &given, const void *packed, int isa) {
  Stem s{given, {}, {}, 1};
  const int64_t hidden = round_up(s.hidden, 4);
  s.by_conv1 = of_layer(round_up(hidden, kMaxLanes), 9 * s.channels, nullptr, nullptr, nullptr, s.threads, isa);
  s.by_conv2 = of_layer(s.dim, 9 * hidden, nullptr, s.bias2, s.scale, s.threads, isa);
  s.by_conv1.segments = 3 * s.channels, s.by_conv2.segments = 3;
  s.by_conv1.packed = (float *)packed, s.by_conv2.packed = (float *)packed + panel_floats(s.by_conv1);
  return s;
}
VL_EXPORT int64_t vl_stem_packed_bytes(const VlStem *given, int isa) {
  const Stem s = stem_of(*given, nullptr, isa);
  return sizeof(float) * (panel_floats(s.by_conv1) + panel_floats(s.by_conv2));
}
// Channels come last, and there are zeros for those beyond the last one.
VL_EXPORT int vl_stem_pack(const VlStem *given, void *packed, int isa) {
  Stem s = stem_of(*given, packed, isa);
  Gemm &first = s.by_conv1, &second = s.by_conv2;
  const size_t unit = s.scale ? 1 : sizeof(float);
  std::vector<float> weight1(first.columns * first.depth);
  std::vector<char> weight2(second.columns * second.depth * unit);
  memcpy(weight1.data(), s.weight1, sizeof(float) * s.hidden * first.depth);
  for (int64_t d = 0; d < s.dim; d++)
    for (int64_t h = 0; h < s.hidden; h++)
      for (int64_t tap = 0; tap < 9; tap++)
        memcpy(&weight2[((d * 9 + tap) * (second.depth / 9) + h) * unit],
               (const char *)s.weight2 + ((d * s.hidden + h) * 9 + tap) * unit, unit);
  first.b = weight1.data(), second.b = weight2.data();
  return pack(first, isa) || pack(second, isa);
}
VL_EXPORT int vl_stem_forward(const VlStem *given, int isa) {
  const void *const packed = packed_of(given, isa, vl_stem_packed_bytes, vl_stem_pack);
  if (!packed) return 1;
  Stem s = stem_of(*given, packed, isa);
  s.strips = std::min<int64_t>(s.threads, convolved(convolved(s.rows, s.stride1), s.stride2));
  return run(s, s.batch * s.strips, s.threads, isa, &Jobs::stem_forward);
}

// The product of rows, which a job chooses, with b, which is (depth, columns).
static Gemm of_rows(const VlBlock &m, int isa, int64_t columns, int64_t depth, const void *b, int64_t b_depth,
                    int64_t b_column, const void *scale = nullptr) {
  const VlGemm product = {0, columns, depth,    m.threads, nullptr, b,     depth,
                          1, b_depth, b_column, nullptr,   nullptr, scale, m.bf16_parts};
  return for_isa({product, nullptr, false}, isa);
}
static int64_t packed_floats(const BlockPart &m) { return panel_floats(m.by_in_proj) + panel_floats(m.by_out_proj); }
static void set_packed(BlockPart &m, const void *packed) {
  m.by_in_proj.packed = (float *)packed;
  m.by_out_proj.packed = packed ? (float *)packed + panel_floats(m.by_in_proj) : nullptr;
}
static int pack(const BlockPart &m, int isa) { return pack(m.by_in_proj, isa) || pack(m.by_out_proj, isa); }
// Packs both weights of a part of a block, unless they are packed, and runs its jobs.
static int run_packed(BlockPart &m, int64_t jobs, int isa, bool (*Jobs::*which)(const BlockPart &, int64_t)) {
  if (!m.by_in_proj.packed) {
    set_packed(m, panel_buffer.reserve(sizeof(float) * packed_floats(m)));
    if (!m.by_in_proj.packed || pack(m, isa)) return 1;
  }
  return run(m, jobs, m.threads, isa, which);
}
BlockPart vilonghorn::mixer_of(const VlBlock &given, int isa) {
  BlockPart b(given);
  b.by_in_proj = of_rows(b, isa, 2 * b.channels, b.dim, b.in_proj, 1, b.dim, b.in_proj_scale);
  b.by_out_proj = of_rows(b, isa, b.dim, b.channels, b.out_proj, 1, b.channels, b.out_proj_scale);
  set_packed(b, b.packed);
  return b;
}
BlockPart vilonghorn::mlp_of(const VlBlock &given, int isa) {
  BlockPart m(given);
  m.by_in_proj = of_rows(m, isa, 2 * m.hidden, m.dim, m.mlp_in_proj, 1, m.dim, m.mlp_in_proj_scale);
  m.by_out_proj = of_rows(m, isa, m.dim, m.hidden, m.mlp_out_proj, 1, m.hidden, m.mlp_out_proj_scale);
  set_packed(m, m.packed ? (const float *)m.packed + packed_floats(mixer_of(given, isa)) : nullptr);
  return m;
}
VL_EXPORT int64_t vl_block_packed_bytes(const VlBlock *b, int isa) {
  return sizeof(float) * (packed_floats(mixer_of(*b, isa)) + (b->hidden ? packed_floats(mlp_of(*b, isa)) : 0));
}
VL_EXPORT int vl_block_pack(const VlBlock *given, void *packed, int isa) {
  VlBlock b = *given;
  b.packed = packed;
  return pack(mixer_of(b, isa), isa) || (b.hidden && pack(mlp_of(b, isa), isa));
}
int vilonghorn::mixer_of_sequences(const VlBlock &given, int isa) {
  BlockPart b = mixer_of(given, isa);
  b.y = (float *)value_buffer.reserve(sizeof(float) * b.batch * b.length * b.channels);
  if (!b.y || !set_neighbors(b.conv_grid, b.length, b.d_conv)) return 1;
  return run_packed(b, b.batch, isa, &Jobs::mixer_forward);
}
int vilonghorn::mixer_of_rows(const VlBlock &given, int64_t strips, int isa) {
  BlockPart b = mixer_of(given, isa);
  b.strips = strips;
  return run_packed(b, b.batch * strips, isa, &Jobs::gated_conv);
}
int vilonghorn::mlp_forward(const VlBlock &given, int isa) {
  BlockPart m = mlp_of(given, isa);
  return run_packed(m, mlp_jobs(m), isa, &Jobs::mlp_forward);
}
int vilonghorn::mlp_backward(const VlBlock &given, float *dmid, int isa) {
  BlockPart m(given);
  const int64_t tokens = m.batch * m.length, dim = m.dim, H = m.hidden;
  m.by_out_proj = of_rows(m, isa, H, dim, m.mlp_out_proj, H, 1);
  m.by_in_proj = of_rows(m, isa, dim, 2 * H, m.mlp_in_proj, dim, 1);
  m.dmid = dmid;
  const bool allocated = value_buffer.allocate([&](Arena &c) {
    m.normed = c.next<float>(tokens * dim), m.dgv = c.next<float>(tokens * 2 * H), m.y = c.next<float>(tokens * H);
  });
  if (!allocated) return 1;
  const VlGemm din = {2 * H, dim, tokens, m.threads, m.dgv,          m.normed, 1,
                      2 * H, dim, 1,      nullptr,   m.dmlp_in_proj, nullptr,  m.bf16_parts};
  const VlGemm dout = {dim, H, tokens, m.threads, m.dout,          m.y,     1,
                       dim, H, 1,      nullptr,   m.dmlp_out_proj, nullptr, m.bf16_parts};
  return sum_gradients(VL_FLOAT32, m.threads, isa, {{m.dmlp_norm_weight, dim, mlp_jobs(m)}},
                       [&] { return run_packed(m, mlp_jobs(m), isa, &Jobs::mlp_backward); }) ||
         (m.dmlp_in_proj && vl_matmul(&din, isa)) || (m.dmlp_out_proj && vl_matmul(&dout, isa));
}
