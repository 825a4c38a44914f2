// Runs numbered jobs on the threads of XLA's pool and the calling one.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

#include "xla/ffi/api/ffi.h"

namespace ksana {

template <typename Task>
void Start(xla::ffi::ThreadPool& pool, Task task) {
#ifdef __SANITIZE_THREAD__  // which does not see how the pool, compiled without it, hands a task over
  std::thread(std::move(task)).detach();
#else
  pool.Schedule(std::move(task));
#endif
}

// Calls job(scratch, index) for each index below `count`; each thread makes a scratch of its own. The calling thread
// works too and waits only for threads that have begun, so that a pool whose threads are all taken cannot block it.
template <typename Make, typename Job>
void RunJobs(xla::ffi::ThreadPool& pool, int64_t count, Make make, Job job) {
  struct State {
    std::atomic<int64_t> next{0};
    std::mutex mutex;
    std::condition_variable idle;
    int64_t working = 0;
    bool closed = false;
  };
  const auto state = std::make_shared<State>();
  const auto work = [&] {
    int64_t index = state->next.fetch_add(1);
    if (index >= count) return;
    auto scratch = make();
    for (; index < count; index = state->next.fetch_add(1)) job(scratch, index);
  };
  const int64_t helpers = std::min<int64_t>(pool.num_threads(), count) - 1;
  for (int64_t i = 0; i < helpers; ++i) {
    Start(pool, [state, &work] {
      {
        std::lock_guard<std::mutex> lock(state->mutex);
        if (state->closed) return;  // what `work` refers to is gone
        ++state->working;
      }
      work();
      std::lock_guard<std::mutex> lock(state->mutex);
      --state->working;
      state->idle.notify_one();
    });
  }
  work();
  std::unique_lock<std::mutex> lock(state->mutex);
  state->closed = true;
  state->idle.wait(lock, [&] { return state->working == 0; });
}

}  // namespace ksana
