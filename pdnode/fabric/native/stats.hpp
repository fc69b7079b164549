// Live counters. Each has one writing thread and any number of readers, which take no lock.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>

namespace pdnode {

class Counter {
 public:
  void add(uint64_t n) {
    value_.store(value_.load(std::memory_order_relaxed) + n, std::memory_order_relaxed);
  }
  uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<uint64_t> value_{0};
};

struct Volume {
  Counter bytes, writes, pages;

  void add(uint64_t more_bytes, uint64_t more_pages) {
    bytes.add(more_bytes);
    writes.add(1);
    pages.add(more_pages);
  }
};

// What one NIC, or one connection, has moved.
struct Flow {
  Volume posted, done, failed;
  Counter received_units;
};

// Counters that several threads write; all of them rare.
struct SharedCounters {
  std::atomic<uint64_t> late_immediates{0}, early_immediates{0}, overshoots{0};
  std::atomic<uint64_t> rejected_connections{0}, registrations{0};
  std::atomic<int64_t> connections{0};
};

constexpr size_t kMaxPairs = 256;  // per session, as on the wire

// Flow of one pair of one session. The list only grows; an entry is used again when its pair
// comes back.
struct PairFlow {
  std::atomic<bool> valid{false};
  int local = -1;
  int remote = -1;
  Flow flow;
};

struct PairFlows {
  std::array<PairFlow, kMaxPairs> entries;
  std::atomic<size_t> used{0};

  // Null when the table is full.
  PairFlow* find_or_add(int local, int remote) {
    for (PairFlow& entry : entries) {
      if (entry.valid.load(std::memory_order_acquire) && entry.local == local &&
          entry.remote == remote) {
        return &entry;
      }
    }
    const size_t index = used.fetch_add(1);
    if (index >= kMaxPairs) {
      used.store(kMaxPairs);
      return nullptr;
    }
    entries[index].local = local;
    entries[index].remote = remote;
    entries[index].valid.store(true, std::memory_order_release);
    return &entries[index];
  }
};

}  // namespace pdnode
