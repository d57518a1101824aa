// The exported functions: choose the instruction set level, share the jobs among threads.
#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <mutex>
#include <thread>
#if defined(__unix__) || defined(__APPLE__)
#include <dlfcn.h>
#include <unistd.h>
#endif
#include "jobs.h"
#include "scratch.h"

namespace vilonghorn {
namespace {

#define VL_JOBS(level)                                                                                              \
  {scan_forward_job_##level, scan_backward_job_##level, conv_forward_job_##level, conv_backward_job_##level,        \
   project_job_##level,      mix_forward_job_##level,   mix_backward_job_##level, unproject_job_##level,              \
   norm_forward_job_##level, norm_backward_job_##level, sum_job_##level,          matmul_pack_job_##level,            \
   matmul_job_##level}
#ifdef VILONGHORN_X86
const Jobs kJobs[] = {VL_JOBS(v2), VL_JOBS(v3), VL_JOBS(v4)};
int64_t (*const kMultiplyAdds[])(int64_t) = {multiply_adds_v2, multiply_adds_v3, multiply_adds_v4};
const char *const kNames[] = {"v2", "v3", "v4"};
bool runs(int level) {
  __builtin_cpu_init();
  const bool v3 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
  const bool v4 = v3 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                  __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  return level == 0 ? __builtin_cpu_supports("sse4.2") : level == 1 ? v3 : v4;
}
#else
const Jobs kJobs[] = {VL_JOBS(generic)};
int64_t (*const kMultiplyAdds[])(int64_t) = {multiply_adds_generic};
const char *const kNames[] = {"generic"};
bool runs(int) { return true; }
#endif
constexpr int kLevels = sizeof kJobs / sizeof *kJobs;

// A team works through numbered jobs; whoever is free takes the next.
struct Work {
  std::function<bool(int64_t)> run;
  int64_t jobs;
  std::atomic<int64_t> next{0};
  std::atomic<bool> ok{true};
  static void take(void *self) {
    Work &w = *(Work *)self;
    for (int64_t job; (job = w.next.fetch_add(1)) < w.jobs;)
      if (!w.run(job)) w.ok = false;
  }
};

// Threads of our own, for processes without a GNU OpenMP pool to share.
class Pool {
 public:
  void run(Work &work, int threads) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);  // a second caller works alone rather than wait
    if (!turn) return Work::take(&work);
    grow(threads - 1);
    {
      std::lock_guard<std::mutex> lock(mutex_);
      work_ = &work, wanted_ = threads - 1, busy_ = 0;
    }
    wake_.notify_all();
    Work::take(&work);
    std::unique_lock<std::mutex> lock(mutex_);
    wanted_ = 0;  // those that have not woken yet are not needed any more
    done_.wait(lock, [&] { return busy_ == 0; });
    work_ = nullptr;
  }

 private:
  void grow(int threads) {
    for (; started_ < threads; started_++) std::thread([this] { serve(); }).detach();
  }
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    for (;;) {
      wake_.wait(lock, [&] { return wanted_ > 0; });
      wanted_--, busy_++;
      Work *work = work_;
      lock.unlock();
      Work::take(work);
      lock.lock();
      if (--busy_ == 0) done_.notify_one();
    }
  }
  std::mutex turn_, mutex_;
  std::condition_variable wake_, done_;
  Work *work_ = nullptr;
  int wanted_ = 0, busy_ = 0, started_ = 0;
};

// Never destroyed, and made anew in a forked child, whose copy of the threads is gone.
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

// torch's own threads keep spinning for a while after each of its operators; a second pool would fight them for the
// cores. GNU OpenMP, which torch loads on Linux, takes teams through this entry point. VILONGHORN_THREADING=std in the
// environment insists on our own threads.
typedef void (*GompParallel)(void (*)(void *), void *, unsigned threads, unsigned flags);
GompParallel gomp_parallel() {
#if defined(__unix__) || defined(__APPLE__)
  static const GompParallel found = [] {
    const char *wish = getenv("VILONGHORN_THREADING");
    const bool own = wish && !strcmp(wish, "std");
    return own ? nullptr : (GompParallel)dlsym(RTLD_DEFAULT, "GOMP_parallel");
  }();
  return found;
#else
  return nullptr;
#endif
}

int64_t jobs_of(const VlNorm &a) { return norm_jobs(a); }
int64_t jobs_of(const Sums &a) { return a.parts; }
int64_t jobs_of(const Product &m) { return matmul_jobs(m); }
template <class Shape> int64_t jobs_of(const Shape &a) { return a.batch * a.parts; }

template <class Args> int run(const Args &a, int64_t jobs, int wanted, int level, bool (*Jobs::*which)(const Args &, int64_t)) {
  if (level < 0)
    for (int l = 0; l < kLevels; l++)
      if (runs(l)) level = l;
  if (level < 0 || level >= kLevels || !runs(level)) return 1;
  Work work;
  work.run = [&](int64_t job) { return (kJobs[level].*which)(a, job); };
  work.jobs = jobs;
  const int threads = (int)(wanted < jobs ? wanted : jobs);
  if (threads <= 1) Work::take(&work);
  else if (gomp_parallel()) gomp_parallel()(Work::take, &work, threads, 0);
  else pool().run(work, threads);
  return work.ok ? 0 : 1;
}
template <class Args, class Shape> int run(const Args &a, const Shape &shape, int level, bool (*Jobs::*which)(const Args &, int64_t)) {
  return run(a, jobs_of(shape), shape.threads, level, which);
}

thread_local Scratch addend_room, panel_room;  // of the calling thread

// A parameter's gradient: where the caller wants it, if at all, and how many numbers it has.
struct Gradient {
  void *&field;
  int64_t size;
};

// Each of `count` jobs leaves gradients of its own, one behind the other, in room that their fields are given for `work`;
// afterwards these are added up.
template <class Work>
int add_gradients(int64_t count, int dtype, int threads, int level, std::initializer_list<Gradient> gradients, Work work) {
  constexpr int64_t kGrain = 16384;  // numbers that a thread should have for its share
  const int64_t bytes = dtype == VL_FLOAT64 ? 8 : 4;
  int64_t total = 0, wanted = 0;
  for (const Gradient &g : gradients) total += g.field ? count * g.size : 0;
  char *at = (char *)addend_room.take(bytes * total);
  if (total > 0 && !at) return 1;
  Sum each[8];
  for (const Gradient &g : gradients)
    if (g.field) each[wanted++] = {at, g.field, g.size}, g.field = at, at += bytes * count * g.size;
  if (work()) return 1;
  const int64_t parts = total < kGrain ? 1 : total / kGrain < threads ? total / kGrain : threads;
  const Sums sums = {each, wanted, count, parts, dtype, threads};
  return run(sums, sums, level, &Jobs::sum);
}

}  // namespace
}  // namespace vilonghorn

using namespace vilonghorn;
VL_EXPORT int vl_abi(void) { return VL_ABI; }
VL_EXPORT int vl_levels(void) { return kLevels; }
VL_EXPORT const char *vl_level_name(int level) { return level >= 0 && level < kLevels ? kNames[level] : ""; }
VL_EXPORT int vl_level_runs(int level) { return level >= 0 && level < kLevels && runs(level); }
VL_EXPORT int64_t vl_multiply_adds(int level, int64_t rounds) { return vl_level_runs(level) ? kMultiplyAdds[level](rounds) : 0; }
VL_EXPORT const char *vl_threading(void) { return gomp_parallel() ? "gomp" : "std"; }
VL_EXPORT int vl_scan_forward(const VlScan *a, int level) { return run(*a, *a, level, &Jobs::scan_forward); }
VL_EXPORT int vl_scan_backward(const VlScan *given, int level) {
  VlScan a = *given;
  const int64_t channels = a.groups * a.channels;
  return add_gradients(a.batch, a.dtype, a.threads, level, {{a.dA, channels * a.states}, {a.dD, channels}, {a.ddt_bias, channels}},
                       [&] { return run(a, a, level, &Jobs::scan_backward); });
}
VL_EXPORT int vl_conv_forward(const VlConv *a, int level) { return run(*a, *a, level, &Jobs::conv_forward); }
VL_EXPORT int vl_conv_backward(const VlConv *given, int level) {
  VlConv a = *given;
  const int64_t channels = a.groups * a.channels;
  return add_gradients(a.batch, a.dtype, a.threads, level, {{a.dweight, channels * a.taps}, {a.dbias, channels}},
                       [&] { return run(a, a, level, &Jobs::conv_backward); });
}
VL_EXPORT int vl_norm_forward(const VlNorm *a, int level) { return run(*a, *a, level, &Jobs::norm_forward); }
VL_EXPORT int vl_norm_backward(const VlNorm *given, int level) {
  VlNorm a = *given;
  return add_gradients(norm_jobs(a), a.dtype, a.threads, level, {{a.dweight, a.channels}},
                       [&] { return run(a, a, level, &Jobs::norm_backward); });
}
// A job that has all channels of its sequence projects them itself.
VL_EXPORT int vl_mix_forward(const VlMix *a, int level) {
  const bool shared = a->scan.parts > 1;
  return (shared && run(*a, a->scan, level, &Jobs::project)) || run(*a, a->scan, level, &Jobs::mix_forward);
}
VL_EXPORT int vl_mix_backward(const VlMix *given, int level) {
  VlMix a = *given;
  VlScan &s = a.scan;
  const int64_t channels = s.groups * s.channels, projected = a.rank + 2 * s.states;
  return add_gradients(s.batch, s.dtype, s.threads, level,
                       {{a.dconv_weight, channels * a.taps}, {a.dconv_bias, channels}, {a.dx_proj, channels * projected},
                        {a.ddt_proj, channels * a.rank}, {s.ddt_bias, channels}, {s.dA, channels * s.states}, {s.dD, channels}},
                       [&] { return run(a, s, level, &Jobs::mix_backward) || (s.parts > 1 && run(a, s, level, &Jobs::unproject)); });
}
VL_EXPORT int vl_matmul(const VlMatmul *given, int level) {
  const int64_t slabs = (given->depth + kPanelDepth - 1) / kPanelDepth, panels = (given->columns + kPanelColumns - 1) / kPanelColumns;
  const Product m = {*given, (float *)panel_room.take(sizeof(float) * given->depth * panels * kPanelColumns)};
  return !m.packed || run(m, slabs * panels, m.threads, level, &Jobs::matmul_pack) || run(m, m, level, &Jobs::matmul);
}
