// Threads that run a pass together, phase by phase.
//
// A phase is a number of tasks. Every thread has a share of adjacent tasks. It takes them one by one from the front of
// its share, then remaining tasks of other shares from their backs. The next phase begins when all tasks are done. A
// late thread skips phases that are over: so a descheduled thread delays the others only if it was running a task.
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
  struct alignas(64) Share {
    std::atomic<uint64_t> taken{0};  // phase, 16 bits << 48 | tasks taken from the front << 24 | from the back
  };

  explicit Team(int num_threads) : num_threads(num_threads), shares(num_threads) {}

  // The first of `count` tasks in a share; for the share after the last, `count`.
  uint32_t begin_of(int share, uint32_t count) const {
    return (uint32_t)(((uint64_t)count * share + num_threads - 1) / num_threads);
  }

  const int num_threads;
  std::vector<Share> shares;
  alignas(64) std::atomic<uint32_t> phase{0};
  alignas(64) std::atomic<uint32_t> done{0};
};

// One thread of a pass.
class Worker {
 public:
  Worker(Team* team, int id) : id(id), team_(team) {}

  const int id;  // below the number of threads

  // The first task of this thread's share of a phase.
  uint32_t first_of(uint32_t count) const { return team_ ? team_->begin_of(id, count) : 0; }

  // Prefetch this memory, which the thread reads later, while it waits for other threads.
  void expect(const char* begin, int64_t bytes) {
    expected_ = begin;
    expected_end_ = begin + bytes;
  }

  // Run a phase: call task(index) for all indices.
  template <typename Task>
  void each(uint32_t count, const Task& task) {
    each_with_next(count, [&](uint32_t i, int64_t) { task(i); });
  }

  // Call task(index, next). `next` is the task that this thread takes after it, unless another thread does; -1 if it is
  // not known.
  template <typename Task>
  void each_with_next(uint32_t count, const Task& task) {
    if (!count)
      return;
    if (!team_) {
      for (int64_t i = 0; i < count; i++)
        task(i, i + 1 < count ? i + 1 : -1);
      return;
    }
    const uint32_t phase = phase_++;
    uint32_t num_done = 0;
    for (int other = 0; other < team_->num_threads; other++)
      num_done += from_share((id + other) % team_->num_threads, phase, count, task);
    if (num_done && team_->done.fetch_add(num_done, std::memory_order_acq_rel) + num_done == count) {
      team_->done.store(0, std::memory_order_relaxed);
      for (Team::Share& share : team_->shares)
        share.taken.store((uint64_t)(phase + 1) << 48, std::memory_order_relaxed);
      team_->phase.store(phase + 1, std::memory_order_release);
    }
    for (int spins = 0; team_->phase.load(std::memory_order_acquire) == phase; spins++) {
      if (expected_ < expected_end_) {
        for (int i = 0; i < kLinesTogether; i++)
          _mm_prefetch(expected_ + i * 64, _MM_HINT_T1);
        expected_ += kLinesTogether * 64;
        continue;
      }
      _mm_pause();
      if (spins > kPatience)
        sched_yield();
    }
  }

 private:
  // Run the remaining tasks of a share; return their number.
  template <typename Task>
  uint32_t from_share(int share, uint32_t phase, uint32_t count, const Task& task) {
    constexpr uint64_t kMost = (1 << 24) - 1;
    const int64_t begin = team_->begin_of(share, count), size = team_->begin_of(share + 1, count) - begin;
    std::atomic<uint64_t>& taken = team_->shares[share].taken;
    uint32_t num_done = 0;
    for (uint64_t now = taken.load(std::memory_order_acquire); now >> 48 == (phase & 0xFFFF);) {
      const int64_t front = now >> 24 & kMost, back = now & kMost;
      if (front + back >= size)
        break;
      if (!taken.compare_exchange_weak(now, now + (share == id ? kMost + 1 : 1), std::memory_order_acq_rel))
        continue;
      const bool is_last = front + back + 1 == size;
      if (share == id) {
        task(begin + front, is_last ? -1 : begin + front + 1);
      } else {
        task(begin + size - 1 - back, is_last ? -1 : begin + size - 2 - back);
      }
      num_done++;
      now = taken.load(std::memory_order_acquire);
    }
    return num_done;
  }

  static constexpr int kPatience = 20000;  // spins; some hundred microseconds
  static constexpr int kLinesTogether = 4;
  Team* team_;
  uint32_t phase_ = 0;
  const char *expected_ = nullptr, *expected_end_ = nullptr;
};

// Threads that sleep between passes. One pass at a time uses them; a concurrent pass runs on its own thread alone.
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
      while ((int)threads_.size() < num_threads - 1)
        threads_.emplace_back([this, id = (int)threads_.size() + 1] { help(id); });
      team_ = &team;
      body_ = &body;
      num_wanted_ = num_threads - 1;
      epoch_.fetch_add(1, std::memory_order_release);
    }
    wake_.notify_all();
    Worker first(&team, 0);
    body(first);
    {
      std::lock_guard<std::mutex> hold(mutex_);
      body_ = nullptr;
    }
    while (num_inside_.load(std::memory_order_acquire))
      _mm_pause();
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
        if (id > num_wanted_)
          continue;
        team = team_;
        body = body_;
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
