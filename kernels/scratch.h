// Memory to work in, which a thread keeps between its jobs: fresh pages for each would cost more than the arithmetic.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>

namespace {

// Hands out memory array by array; with no memory, it counts how much there must be. No array begins a power of two behind
// another one: the same steps of both would compete for one place of the cache.
struct Carver {
  char *data;
  size_t used = 0;
  template <class E> E *next(int64_t count) {
    E *array = (E *)((uintptr_t)data + used);  // in integers: no memory has no addresses to add to
    used += ((sizeof(E) * count + 63) / 64 | 1) * 64 + 256;
    return array;
  }
};

struct Scratch {
  void *data = nullptr;
  size_t size = 0;
  ~Scratch() { free(data); }
  template <class Layout> bool carve(Layout layout) {  // which takes its arrays from a Carver
    Carver sizes{nullptr};
    layout(sizes);
    Carver arrays{(char *)take(sizes.used)};
    if (!arrays.data) return false;
    layout(arrays);
    return true;
  }
  void *take(size_t bytes) {
    if (bytes > size) {
      free(data);
      size = (bytes + 63) / 64 * 64;
      data = aligned_alloc(64, size);
      if (!data) size = 0;
    }
    return data;
  }
};

}  // namespace
