// Clock, descriptors, random bytes.
#pragma once

#include <sys/eventfd.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>

namespace pdnode {

// CLOCK_MONOTONIC: the same clock as Python's time.monotonic_ns(), in every process of the host.
inline int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1'000'000'000 + now.tv_nsec;
}

inline std::string errno_text(const char* operation, int code) {
  return std::string(operation) + ": " + std::strerror(code) + " (" + std::to_string(code) + ")";
}

class Fd {
 public:
  Fd() = default;
  explicit Fd(int fd) : fd_(fd) {}
  Fd(Fd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Fd& operator=(Fd&& other) noexcept {
    reset(std::exchange(other.fd_, -1));
    return *this;
  }
  ~Fd() { reset(); }
  void reset(int fd = -1) {
    if (fd_ >= 0) ::close(fd_);
    fd_ = fd;
  }
  int get() const { return fd_; }

 private:
  int fd_ = -1;
};

inline Fd make_eventfd() { return Fd(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)); }

// Neither can block: the counter of an eventfd overflows after 2^64 - 2 unread signals.
inline void signal_eventfd(int fd) {
  const uint64_t one = 1;
  while (::write(fd, &one, sizeof one) < 0 && errno == EINTR) {
  }
}

inline void drain_eventfd(int fd) {
  uint64_t value = 0;
  while (::read(fd, &value, sizeof value) < 0 && errno == EINTR) {
  }
}

// From the kernel: a key grants write access to KV memory, so it must not be guessable.
inline uint64_t random_u64() {
  uint64_t value = 0;
  while (getrandom(&value, sizeof value, 0) != sizeof value) {
  }
  return value;
}

}  // namespace pdnode
