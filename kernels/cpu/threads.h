// Threads of the caller, for a library that runs inside a program with a pool of its own.
#pragma once
#include <stddef.h>

namespace vilonghorn {
struct CallerThreads {
  virtual void parallel_for(void (*run)(void *data, size_t job), size_t jobs, void *data) = 0;  // returns when all ran
};
// If not null, the jobs of the calls of this thread run there, whatever `threads` is, which only divides the work.
extern thread_local CallerThreads *caller_threads;
}  // namespace vilonghorn
