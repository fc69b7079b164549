// Shared memory of the workers, mapped here: KV regions and counter pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "error.hpp"
#include "util.hpp"

namespace pdnode {

// Layout of the counter page; pdnode/engine/protocol.py has the same numbers.
constexpr size_t kCounterPageBytes = 4096;
constexpr size_t kSleepingOffset = 64;
constexpr size_t kSleepingStride = 64;
constexpr int kMaxGroups = 16;
constexpr size_t kSilentOffset = 2048;

class Mapping {
 public:
  // Maps `size` bytes of `fd`, which must be at least that long (else a touch would be SIGBUS).
  static Error open(int fd, size_t size, const char* what, std::unique_ptr<Mapping>* mapping);
  // Memory of a device that somebody else has mapped, and unmaps.
  static std::unique_ptr<Mapping> of_device(uint8_t* data, size_t size);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();
  uint8_t* data() const { return data_; }
  size_t size() const { return size_; }
  size_t page_bytes() const { return page_bytes_; }  // the kernel's, 2 MiB where it is huge

 private:
  Mapping(uint8_t* data, size_t size, size_t page_bytes, bool owned)
      : data_(data), size_(size), page_bytes_(page_bytes), owned_(owned) {}
  size_t mapped() const;  // whole pages: munmap takes no part of a huge one
  uint8_t* data_;
  size_t size_, page_bytes_;
  bool owned_;
};

// Memory to register: `page_bytes` may not straddle two pieces, `memory_page_bytes` is what the
// kernel maps it in.
struct Memory {
  uint8_t* data = nullptr;
  uint64_t size = 0, page_bytes = 0, memory_page_bytes = 4096;
  int dmabuf = -1;  // of a device's memory
  uint64_t device = 0;  // its number
};

// A worker's KV memory. Unmapped when the last session and program that use it are gone.
struct Region {
  int number = -1;
  int group = -1;
  uint64_t page_bytes = 0;
  std::unique_ptr<Mapping> memory;
  Fd dmabuf;  // of a device's memory, which only the NICs may touch
  uint64_t device = 0;
  uint8_t* data() const { return memory->data(); }
  uint64_t size() const { return memory->size(); }
  Memory whole() const {
    return {data(), size(), page_bytes, memory->page_bytes(), dmabuf.get(), device};
  }
};

// A worker's layer counter, as the daemon sees it.
class CounterPage {
 public:
  explicit CounterPage(std::unique_ptr<Mapping> memory) : memory_(std::move(memory)) {}
  const std::atomic<uint64_t>& value() const {
    return *reinterpret_cast<const std::atomic<uint64_t>*>(memory_->data());
  }
  std::atomic<uint32_t>& sleeping(int group) const {
    return *reinterpret_cast<std::atomic<uint32_t>*>(
        memory_->data() + kSleepingOffset + kSleepingStride * static_cast<size_t>(group));
  }
  // Who raises cannot wake a thread that sleeps (a GPU).
  bool silent() const {
    return reinterpret_cast<const std::atomic<uint32_t>*>(memory_->data() + kSilentOffset)
               ->load(std::memory_order_relaxed) != 0;
  }

 private:
  std::unique_ptr<Mapping> memory_;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

// The worker's side: one writer.
class LayerCounter {
 public:
  static Error open(int page_fd, const std::vector<int>& wake_fds,
                    std::unique_ptr<LayerCounter>* counter);
  void raise();
  uint64_t value() const;

 private:
  std::unique_ptr<Mapping> memory_;
  std::vector<Fd> wake_;
};

}  // namespace pdnode
