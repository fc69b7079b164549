#include "memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <string>
#include <utility>

namespace pdnode {

Error Mapping::open(int fd, size_t size, const char* what, std::unique_ptr<Mapping>* mapping) {
  struct stat status;
  if (fstat(fd, &status) != 0) return Error(errno_text(what, errno));
  if (size == 0 || static_cast<uint64_t>(status.st_size) < size) {
    return Error(std::string(what) + ": the descriptor has " + std::to_string(status.st_size) +
                 " bytes, " + std::to_string(size) + " are to be mapped");
  }
  void* data = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) return Error(errno_text(what, errno));
  // Of a memfd this is the size of its pages.
  const size_t page_bytes = static_cast<size_t>(status.st_blksize);
  mapping->reset(new Mapping(static_cast<uint8_t*>(data), size, page_bytes, true));
  return Error();
}

size_t Mapping::mapped() const { return (size_ + page_bytes_ - 1) / page_bytes_ * page_bytes_; }

Mapping::~Mapping() {
  if (owned_) munmap(data_, mapped());
}

std::unique_ptr<Mapping> Mapping::of_device(uint8_t* data, size_t size) {
  constexpr size_t kDevicePageBytes = 64 << 10;  // the smallest that CUDA hands out
  return std::unique_ptr<Mapping>(new Mapping(data, size, kDevicePageBytes, false));
}

Error LayerCounter::open(int page_fd, const std::vector<int>& wake_fds,
                         std::unique_ptr<LayerCounter>* counter) {
  if (wake_fds.size() > kMaxGroups) {
    return Error("wake_fds: " + std::to_string(wake_fds.size()) + " given, at most " +
                 std::to_string(kMaxGroups));
  }
  auto opened = std::make_unique<LayerCounter>();
  if (Error error = Mapping::open(page_fd, kCounterPageBytes, "page_fd", &opened->memory_)) {
    return error;
  }
  for (const int fd : wake_fds) {
    Fd copy(fcntl(fd, F_DUPFD_CLOEXEC, 0));
    if (copy.get() < 0) return Error(errno_text("wake_fds", errno));
    opened->wake_.push_back(std::move(copy));
  }
  *counter = std::move(opened);
  return Error();
}

void LayerCounter::raise() {
  auto& value = *reinterpret_cast<std::atomic<uint64_t>*>(memory_->data());
  value.store(value.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  // Pairs with the fence of the sleeper, which sets its word and then looks at the counter again:
  // one of the two sees the other.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  for (size_t group = 0; group < wake_.size(); ++group) {
    auto& sleeping = *reinterpret_cast<std::atomic<uint32_t>*>(
        memory_->data() + kSleepingOffset + kSleepingStride * group);
    if (sleeping.load(std::memory_order_relaxed) != 0 && sleeping.exchange(0) != 0) {
      signal_eventfd(wake_[group].get());
    }
  }
}

uint64_t LayerCounter::value() const {
  return reinterpret_cast<const std::atomic<uint64_t>*>(memory_->data())->load();
}

}  // namespace pdnode
