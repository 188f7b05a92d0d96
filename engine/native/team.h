// Threads that go through a pass together, phase by phase.
//
// A phase is a number of tasks that any thread may claim, one or a run of neighbours; the next begins when all are done. Who comes
// late finds phases over and skips them: a thread that the system has put aside holds up nobody, unless it was put aside with a
// claim of its own, of which the first in a phase are the longest.
#pragma once
#include <immintrin.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

namespace latebranch {

struct Team {
  explicit Team(int num_threads) : num_threads(num_threads) {}

  const int num_threads;
  alignas(64) std::atomic<uint64_t> claim{0};  // phase << 32 | next task
  alignas(64) std::atomic<uint32_t> done{0};
};

// One thread's way through a pass.
class Worker {
 public:
  Worker(Team* team, int id) : id(id), team_(team) {}

  const int id;  // below the number of threads asked for

  // A phase of tasks that are claimed one by one.
  template <typename Task>
  void each(uint32_t count, const Task& task) {
    each_run(count, [](uint32_t) { return 1u; }, [&](uint32_t begin, uint32_t end) {
      for (uint32_t i = begin; i < end; i++) task(i);
    });
  }

  // A phase of tasks of which neighbours are better done by one thread: long runs first, single ones at the end.
  template <typename Tasks>
  void each_run(uint32_t count, const Tasks& tasks) {
    const uint32_t share = team_ ? 3 * team_->num_threads / 2 : 1;
    each_run(count, [share](uint32_t left) { return std::max(1u, left / share); }, tasks);
  }

 private:
  // Call tasks(begin, end) of runs; length(left) says how many of those that are left are claimed together.
  template <typename Length, typename Tasks>
  void each_run(uint32_t count, const Length& length, const Tasks& tasks) {
    if (!count) return;
    if (!team_) return tasks(0, count);
    const uint32_t phase = phase_++;
    for (uint64_t claim = team_->claim.load(std::memory_order_acquire);;) {
      const uint32_t begin = (uint32_t)claim;
      if ((uint32_t)(claim >> 32) != phase || begin >= count) break;
      const uint32_t run = length(count - begin);
      if (!team_->claim.compare_exchange_weak(claim, claim + run, std::memory_order_acq_rel)) continue;
      tasks(begin, begin + run);
      if (team_->done.fetch_add(run, std::memory_order_acq_rel) + run == count) {
        team_->done.store(0, std::memory_order_relaxed);
        team_->claim.store((uint64_t)(phase + 1) << 32, std::memory_order_release);
      }
      claim = team_->claim.load(std::memory_order_acquire);
    }
    for (int spins = 0; (uint32_t)(team_->claim.load(std::memory_order_acquire) >> 32) == phase; spins++) {
      _mm_pause();
      if (spins > kPatience) sched_yield();
    }
  }

  static constexpr int kPatience = 20000;  // spins; some hundred microseconds
  Team* team_;
  uint32_t phase_ = 0;
};

// Helpers that sleep between passes. One pass at a time has them; another that comes meanwhile does without.
class Pool {
 public:
  using Body = std::function<void(Worker&)>;

  void run(int num_threads, const Body& body) {
    std::unique_lock<std::mutex> turn(turn_, std::try_to_lock);
    if (num_threads < 2 || !turn.owns_lock()) {
      Worker alone(nullptr, 0);
      body(alone);
      return;
    }
    Team team(num_threads);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      while ((int)threads_.size() < num_threads - 1) threads_.emplace_back([this, id = (int)threads_.size() + 1] { help(id); });
      team_ = &team, body_ = &body, num_wanted_ = num_threads - 1;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Worker first(&team, 0);
    body(first);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      body_ = nullptr;
    }
    while (num_inside_.load(std::memory_order_acquire)) _mm_pause();
  }

  static Pool& shared() {
    static Pool* pool = new Pool;  // never destroyed: its threads outlive main's end
    return *pool;
  }

 private:
  void help(int id) {
    uint64_t seen = 0;
    for (;;) {
      Team* team;
      const Body* body;
      {
        std::unique_lock<std::mutex> hold(mutex_);
        wake_.wait(hold, [&] { return epoch_.load(std::memory_order_acquire) != seen && body_; });
        seen = epoch_.load(std::memory_order_acquire);
        if (id > num_wanted_) continue;
        team = team_, body = body_;
        num_inside_.fetch_add(1, std::memory_order_acq_rel);
      }
      Worker worker(team, id);
      (*body)(worker);
      num_inside_.fetch_sub(1, std::memory_order_acq_rel);
    }
  }

  std::mutex turn_, mutex_;
  std::condition_variable wake_;
  std::vector<std::thread> threads_;
  std::atomic<uint64_t> epoch_{0};
  std::atomic<int> num_inside_{0};
  Team* team_ = nullptr;
  const Body* body_ = nullptr;
  int num_wanted_ = 0;
};

}  // namespace latebranch
