// Working memory that a thread keeps between jobs, because fresh pages cost more than the arithmetic.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

namespace {

// Hands out arrays one after another. With data = nullptr it only counts the bytes. Array starts never differ by a
// power of two: the same steps of both arrays would then compete for the same cache set.
struct Arena {
  char *data;
  size_t used = 0;
  template <class E> E *next(int64_t count) {
    E *array = (E *)((uintptr_t)data + used);  // integer arithmetic: pointer arithmetic on null is undefined
    used += ((sizeof(E) * count + 63) / 64 | 1) * 64 + 256;
    return array;
  }
};

struct Scratch {
  void *block = nullptr, *data = nullptr;  // data: the first multiple of 64 in block; Windows lacks aligned_alloc
  size_t size = 0;
  ~Scratch() { free(block); }
  template <class Layout> bool allocate(Layout layout) {  // layout(Arena &) takes all arrays
    Arena counter{nullptr};
    layout(counter);
    Arena arrays{(char *)reserve(counter.used)};
    if (!arrays.data) return false;
    layout(arrays);
    return true;
  }
  void *reserve(size_t bytes) {
    if (bytes > size) {
      free(block);
      block = malloc(bytes + 63);
      size = block ? bytes : 0;
      data = block ? (void *)(((uintptr_t)block + 63) / 64 * 64) : nullptr;
    }
    return data;
  }
};

}  // namespace
