// Events for Python: one bounded-by-nature queue (each kind comes at most once per session pair,
// armed slot or transfer) and the eventfd that says it is not empty.
#pragma once

#include <cstdint>
#include <deque>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "util.hpp"

namespace pdnode {

using Pair = std::pair<int, int>;  // (local NIC, remote NIC)

enum class EventKind : uint8_t {
  kOpened, kCarried, kConnected, kProbed, kLost, kFenced, kReached, kOvershoot, kDrained, kFailed,
  kSettled
};
constexpr const char* kEventNames[] = {"opened",  "carried",   "connected", "probed",
                                       "lost",    "fenced",    "reached",   "overshoot",
                                       "drained", "failed",    "settled"};

struct Event {
  EventKind kind = EventKind::kOpened;
  int64_t session = -1;
  Pair pair{-1, -1};
  int slot = 0;
  int generation = 0;
  int64_t count = 0;
  int64_t transfer = -1;
  std::string text;
  std::vector<Pair> pairs;
};

class EventQueue {
 public:
  EventQueue() : fd_(make_eventfd()) {}

  // Any thread. The lock is held for a few moves only; nothing here waits for Python.
  void push(Event event) {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.push_back(std::move(event));
    if (queue_.size() == 1) signal_eventfd(fd_.get());
  }

  std::vector<Event> take(size_t most) {
    const std::lock_guard<std::mutex> lock(mutex_);
    std::vector<Event> taken;
    while (!queue_.empty() && taken.size() < most) {
      taken.push_back(std::move(queue_.front()));
      queue_.pop_front();
    }
    if (fd_.get() >= 0) {
      drain_eventfd(fd_.get());
      if (!queue_.empty()) signal_eventfd(fd_.get());
    }
    return taken;
  }

  // After the threads are gone.
  void close() {
    const std::lock_guard<std::mutex> lock(mutex_);
    queue_.clear();
    fd_.reset();
  }

  int fd() const { return fd_.get(); }

 private:
  std::mutex mutex_;
  std::deque<Event> queue_;
  Fd fd_;
};

}  // namespace pdnode
