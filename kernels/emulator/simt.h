// Runs the source of a CUDA kernel on the CPU, for tests. Every thread of a block is a fiber, which runs to its next
// barrier or shuffle. One block runs at a time: this tests results and synchronization, not speed. The order of blocks,
// warps and threads is random, as is when a copy arrives, and shared memory begins with NaN or what the last block
// left. A barrier that some thread never reaches is reported as an error.
//
// With -fsanitize=thread, ThreadSanitizer reports races: every thread is one of its fibers, and only barriers and the
// end of a launch order accesses. A copy accesses memory when it starts and when it is waited for.
#pragma once
#include <math.h>
#include <setjmp.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <algorithm>
#include <functional>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#ifdef __SANITIZE_THREAD__
#include <sanitizer/tsan_interface.h>
extern "C" void __tsan_ignore_thread_begin(), __tsan_ignore_thread_end();  // of this thread's accesses
extern "C" void __tsan_read_range(const void *, size_t), __tsan_write_range(void *, size_t);
constexpr bool kFindsRaces = true;
#else
constexpr bool kFindsRaces = false;
static inline void *__tsan_create_fiber(unsigned) { return nullptr; }
static inline void __tsan_destroy_fiber(void *) {}
static inline void __tsan_acquire(void *) {}
static inline void __tsan_release(void *) {}
static inline void __tsan_ignore_thread_begin() {}
static inline void __tsan_ignore_thread_end() {}
static inline void __tsan_read_range(const void *, size_t) {}
static inline void __tsan_write_range(void *, size_t) {}
#endif

#define VL_DEVICE inline
#define VL_SHARED(name) unsigned char *const name = emulator::shared.data()
#define VL_UNROLL
#define VL_ROLL
#define __global__ static
#define __grid_constant__
#define __launch_bounds__(...)

struct dim3 {
  unsigned x, y, z;
  dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
static dim3 threadIdx, blockIdx, blockDim, gridDim;

namespace emulator {

struct Unchecked {  // Accesses of the emulator itself are no races.
  Unchecked() { __tsan_ignore_thread_begin(); }
  ~Unchecked() { __tsan_ignore_thread_end(); }
};

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
  char order[2];  // what ThreadSanitizer orders by, for this and the next generation
};

struct Copy {
  void *to;
  const void *from;
  size_t bytes;
  bool is_read;  // `data` holds what was at `from`
  unsigned char data[16];
};

constexpr size_t kStack = 128 << 10;
constexpr int kWarp = 32;

struct Fiber {  // of one block
  dim3 thread;
  std::vector<Copy> copies;     // that it has started
  std::vector<float> shuffled;  // all that it has given to other lanes
  bool started = false, done = false;
  ucontext_t start;
  jmp_buf resume;  // cheaper than swapcontext, which saves the signal mask by a system call
  std::unique_ptr<char[]> stack{new char[kStack]};
  void *const tsan = __tsan_create_fiber(0);
  ~Fiber() { __tsan_destroy_fiber(tsan); }
};

static std::vector<unsigned char> shared;
static std::vector<Fiber> fibers;
static std::vector<Barrier> barriers;  // of the warps, then that of the block
static char launch;                    // what ThreadSanitizer orders a launch by
static std::function<void()> body;
static Fiber *current;
static bool progress;
static int64_t *plan;  // where launches are recorded instead of run: their number, then three numbers of each
static std::minstd_rand random;

static int draw(int count) { return (int)(random() / 8 % count); }  // the last bits of its numbers are less random
static std::vector<int> random_order(int count) {
  std::vector<int> order(count);
  std::iota(order.begin(), order.end(), 0);
  for (int i = count; i > 1; i--) std::swap(order[i - 1], order[draw(i)]);
  return order;
}

static int index_in_block() { return threadIdx.y * blockDim.x + threadIdx.x; }

#ifdef __SANITIZE_THREAD__  // which does not know the stacks that longjmp would switch to
static ucontext_t scheduler;
static void *scheduler_tsan;
static void yield_fiber() {
  Fiber *const self = current;
  __tsan_switch_to_fiber(scheduler_tsan, __tsan_switch_to_fiber_no_sync);
  swapcontext(&self->start, &scheduler);
}
static void resume(Fiber &fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  scheduler_tsan = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(fiber.tsan, __tsan_switch_to_fiber_no_sync);
  swapcontext(&scheduler, &fiber.start);
}
#else
static jmp_buf scheduler;
static void yield_fiber() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}
static void resume(Fiber &fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}
#endif

static void wait(Barrier &barrier) {
  const unsigned generation = barrier.generation;
  progress = true;
  __tsan_release(&barrier.order[generation % 2]);
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.generation++;
  }
  while (barrier.generation == generation) yield_fiber();
  __tsan_acquire(&barrier.order[generation % 2]);
}

static void run_fiber() {
  body();
  __tsan_release(&launch);
  {
    Unchecked unchecked;
    current->done = progress = true;
  }
  yield_fiber();
}

// Returns false on deadlock.
static bool run_block(size_t shared_bytes) {
  if (draw(2)) shared.assign(shared_bytes, 0xff);
  else shared.resize(shared_bytes, 0xff);
  // All memory is new: ThreadSanitizer forgets what another block did there.
  shared = std::vector<unsigned char>(shared);
  const int count = blockDim.x * blockDim.y, num_warps = (count + kWarp - 1) / kWarp;
  fibers = std::vector<Fiber>(count);
  barriers = std::vector<Barrier>(num_warps + 1);
  for (int i = 0; i < count; i++) {
    Fiber &fiber = fibers[i];
    barriers[i / kWarp].expected++;
    fiber.thread = dim3(i % blockDim.x, i / blockDim.x);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
  int idle = 0;  // rounds without progress
  for (bool all_done = false; !all_done;) {
    all_done = true;
    progress = false;
    const int held = draw(2) ? draw(num_warps) : -1;  // a warp that the others overtake
    for (const int warp : random_order(num_warps))
      for (const int lane : random_order(kWarp)) {
        const int i = warp * kWarp + lane;
        if (i >= count) continue;
        if (!fibers[i].done && (warp != held || num_warps == 1)) resume(fibers[i]);
        all_done = all_done && fibers[i].done;
      }
    if (progress) idle = 0;
    else if (!all_done && ++idle == 64) return false;  // in all of these the same warp cannot have been held
  }
  return true;
}

}  // namespace emulator

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchTimeout };
static inline const char *cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorLaunchTimeout ? "the threads of a block wait for each other forever" : "invalid argument";
}
static inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }
struct cudaFuncAttributes {};
template <class Kernel> cudaError_t cudaFuncGetAttributes(cudaFuncAttributes *, Kernel) { return cudaSuccess; }

namespace vilonghorn {

static inline float exp2_of(float x) { return exp2f(x); }
static inline float log2_of(float x) { return log2f(x); }
static inline float min_nan(float x, float limit) { return x > limit ? limit : x; }
static inline float reciprocal(float x) { return 1.f / x; }
static inline float rsqrt_of(float x) { return 1.f / sqrtf(x); }
static inline int uniform(int value) { return value; }
template <class T> static inline void pin(T &) {}
static inline void wait_for_copies(size_t left = 0) {  // until so many copies are left, in any order
  std::vector<emulator::Copy> &copies = emulator::current->copies;
  for (const emulator::Copy &copy : copies) {
    __tsan_read_range(copy.from, copy.bytes);
    __tsan_write_range(copy.to, copy.bytes);
  }
  emulator::Unchecked unchecked;
  while (copies.size() > left) {
    std::swap(copies[emulator::draw((int)copies.size())], copies.back());
    const emulator::Copy &copy = copies.back();
    memcpy(copy.to, copy.is_read ? copy.data : copy.from, copy.bytes);
    copies.pop_back();
  }
}
template <int BYTES> static inline void copy_async(void *to, const void *from) {
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) abort();  // as a GPU does
  __tsan_read_range(from, BYTES), __tsan_write_range(to, BYTES);
  emulator::Unchecked unchecked;
  emulator::current->copies.push_back({to, from, BYTES, emulator::draw(2) == 1, {}});
  memcpy(emulator::current->copies.back().data, from, BYTES);
  if (!kFindsRaces && !emulator::draw(8)) wait_for_copies(emulator::draw((int)emulator::current->copies.size() + 1));
}
static inline void sync_warp() {
  emulator::Unchecked unchecked;
  emulator::wait(emulator::barriers[emulator::index_in_block() / emulator::kWarp]);
}
static inline void part_steps() {}
static inline void sync_teams(int threads) {
  emulator::Unchecked unchecked;
  emulator::barriers.back().expected = threads;
  emulator::wait(emulator::barriers.back());
}
static inline void sync_block() { sync_teams(blockDim.x * blockDim.y); }
static inline float shuffle_xor(float value, int mask) {
  emulator::Unchecked unchecked;
  // Lanes wait for each other in pairs: on a GPU all of a warp do, but that orders no accesses of memory.
  const std::vector<float> &other = emulator::fibers[emulator::index_in_block() ^ mask].shuffled;
  const size_t number = emulator::current->shuffled.size();
  emulator::current->shuffled.push_back(value);
  emulator::progress = true;
  while (other.size() <= number) emulator::yield_fiber();
  return other[number];
}

struct bfloat16 {
  uint16_t bits;
};
static inline float to_fp32(float x) { return x; }
static inline float from_bits(uint32_t bits) {
  float out;
  memcpy(&out, &bits, 4);
  return out;
}
static inline float to_fp32(bfloat16 x) { return from_bits((uint32_t)x.bits << 16); }
template <class T> T from_fp32(float x);
template <> inline float from_fp32<float>(float x) { return x; }
template <> inline bfloat16 from_fp32<bfloat16>(float x) {  // to nearest, ties to even, as on a GPU
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if (x != x) return {0x7fff};
  return {(uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}

template <class Args>
static int launch(void (*kernel)(Args), const Args &args, int64_t blocks, dim3 threads, size_t shared, void *) {
  if (shared > 99 << 10) return cudaErrorInvalidValue;  // the limit of the smallest GPUs
  if (emulator::plan) {
    int64_t *const entry = emulator::plan + 1 + 3 * emulator::plan[0]++;
    entry[0] = blocks, entry[1] = (int64_t)threads.x * threads.y * threads.z, entry[2] = (int64_t)shared;
    return cudaSuccess;
  }
  emulator::Unchecked unchecked;
  blockDim = threads;
  gridDim = dim3((unsigned)blocks);
  emulator::body = [&] { kernel(args); };
  for (const int block : emulator::random_order((int)blocks)) {
    blockIdx = dim3((unsigned)block);
    if (!emulator::run_block(shared)) return cudaErrorLaunchTimeout;
  }
  __tsan_acquire(&emulator::launch);
  return cudaSuccess;
}

}  // namespace vilonghorn

// Restarts the random orders. Two runs after it differ in their orders, so a missing barrier changes a result.
extern "C" __attribute__((visibility("default"))) void vl_emulator_seed(int seed) { emulator::random.seed(seed + 1); }

// Records launches instead of running them: their number, then blocks, threads and bytes of each. Null: runs them.
extern "C" __attribute__((visibility("default"))) void vl_emulator_plan(int64_t *plan) { emulator::plan = plan; }
