// Runs the source of a CUDA kernel on the CPU, for tests. Every thread of a block is a fiber; a barrier or a shuffle
// switches to the next fiber. One block runs at a time: this tests results and synchronization, not speed. Shared
// memory starts as NaN. A barrier that some thread never reaches is reported as an error.
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
#include <vector>

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

struct Barrier {
  int expected = 0, arrived = 0;
  unsigned generation = 0;
};

struct Copy {
  void *to;
  const void *from;
  size_t bytes;
};

struct Fiber {
  dim3 thread;
  std::vector<Copy> copies;  // that it has started
  bool started = false, done = false;
  ucontext_t start;
  jmp_buf resume;  // cheaper than swapcontext, which saves the signal mask by a system call
  std::unique_ptr<char[]> stack;
};

constexpr size_t kStack = 128 << 10;
constexpr int kWarp = 32;
static std::vector<unsigned char> shared;
static std::vector<Fiber> fibers;
static std::vector<Barrier> warps;
static std::vector<std::vector<float>> slots;  // values that lanes exchange; two sets, for this and the next exchange
static Barrier teams;
static std::function<void()> body;
static jmp_buf scheduler;
static Fiber *current;
static bool progress;
static int64_t *plan;       // where launches are recorded instead of run: their number, then three numbers of each
static bool reverse_order;  // run the threads of a block from the last to the first, and copies at once, not at a wait

static int index_in_block() { return threadIdx.y * blockDim.x + threadIdx.x; }

static void yield_fiber() {
  if (!_setjmp(current->resume)) _longjmp(scheduler, 1);
}

static void wait(Barrier &barrier) {
  progress = true;
  if (++barrier.arrived == barrier.expected) {
    barrier.arrived = 0;
    barrier.generation++;
    return;
  }
  for (const unsigned generation = barrier.generation; barrier.generation == generation;) yield_fiber();
}

static void run_fiber() {
  body();
  current->done = progress = true;
  _longjmp(scheduler, 1);
}

static void resume(Fiber &fiber) {
  current = &fiber;
  threadIdx = fiber.thread;
  if (_setjmp(scheduler)) return;
  if (fiber.started) _longjmp(fiber.resume, 1);
  fiber.started = true;
  setcontext(&fiber.start);
}

// Returns false on deadlock.
static bool run_block(size_t shared_bytes) {
  shared.assign(shared_bytes, 0xff);
  const int count = blockDim.x * blockDim.y;
  fibers.resize(count);
  warps.assign((count + kWarp - 1) / kWarp, Barrier());
  slots.assign(warps.size(), std::vector<float>(2 * kWarp));
  teams = Barrier();
  for (int i = 0; i < count; i++) {
    Fiber &fiber = fibers[i];
    warps[i / kWarp].expected++;
    fiber.thread = dim3(i % blockDim.x, i / blockDim.x);
    fiber.started = fiber.done = false;
    fiber.copies.clear();
    if (!fiber.stack) fiber.stack.reset(new char[kStack]);
    getcontext(&fiber.start);
    fiber.start.uc_stack.ss_sp = fiber.stack.get();
    fiber.start.uc_stack.ss_size = kStack;
    fiber.start.uc_link = nullptr;
    makecontext(&fiber.start, run_fiber, 0);
  }
  for (bool all_done = false; !all_done;) {
    all_done = true;
    progress = false;
    for (int i = 0; i < count; i++) {
      Fiber &fiber = fibers[reverse_order ? count - 1 - i : i];
      if (!fiber.done) resume(fiber);
      all_done = all_done && fiber.done;
    }
    if (!all_done && !progress) return false;
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
static inline int uniform(int value) { return value; }
template <class T> static inline void pin(T &) {}
static inline void wait_for_copies() {
  for (const emulator::Copy &copy : emulator::current->copies) memcpy(copy.to, copy.from, copy.bytes);
  emulator::current->copies.clear();
}
template <int BYTES> static inline void copy_async(void *to, const void *from) {
  if ((uintptr_t)to % BYTES || (uintptr_t)from % BYTES) abort();  // as a GPU does
  emulator::current->copies.push_back({to, from, BYTES});
  if (emulator::reverse_order) wait_for_copies();
}
static inline void sync_warp() { emulator::wait(emulator::warps[emulator::index_in_block() / emulator::kWarp]); }
static inline void sync_teams(int threads) {
  emulator::teams.expected = threads;
  emulator::wait(emulator::teams);
}
static inline void sync_block() { sync_teams(blockDim.x * blockDim.y); }
static inline float shuffle_xor(float value, int mask) {
  const int index = emulator::index_in_block(), warp = index / emulator::kWarp, lane = index % emulator::kWarp;
  emulator::Barrier &barrier = emulator::warps[warp];
  float *values = emulator::slots[warp].data() + (barrier.generation & 1) * emulator::kWarp;
  values[lane] = value;
  emulator::wait(barrier);
  return values[lane ^ mask];
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
  blockDim = threads;
  gridDim = dim3((unsigned)blocks);
  emulator::body = [&] { kernel(args); };
  for (int64_t block = 0; block < blocks; block++) {
    blockIdx = dim3((unsigned)block);
    if (!emulator::run_block(shared)) return cudaErrorLaunchTimeout;
  }
  return cudaSuccess;
}

}  // namespace vilonghorn

// Tests run every kernel in both orders: a missing barrier changes the result.
extern "C" __attribute__((visibility("default"))) void vl_emulator_order(int reverse_order) {
  emulator::reverse_order = reverse_order;
}

// Records launches instead of running them: their number, then blocks, threads and bytes of each. Null: runs them.
extern "C" __attribute__((visibility("default"))) void vl_emulator_plan(int64_t *plan) { emulator::plan = plan; }
